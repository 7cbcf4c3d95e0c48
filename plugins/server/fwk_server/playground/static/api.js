// What the pages share: nodes, the key, the colours, and requests of the server they come from.

export const $ = (id) => document.getElementById(id);

export function element(name, settings = {}, ...children) {
  const made = document.createElement(name);
  Object.assign(made, settings);
  made.append(...children);
  return made;
}

export function headers() {
  const key = $("key").value.trim();
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

// The key is kept for this tab alone: what is stored longer can be read by whoever uses the browser next.
export function keepKey(changed) {
  $("key").value = sessionStorage.getItem("fwk-key") ?? "";
  $("key").onchange = () => {
    sessionStorage.setItem("fwk-key", $("key").value);
    changed();
  };
}

export function themes() {
  const kept = localStorage.getItem("fwk-theme");
  if (kept) document.documentElement.dataset.theme = kept;
  $("theme").onclick = () => {
    const now = document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
    localStorage.setItem("fwk-theme", document.documentElement.dataset.theme);
  };
}

// Puts a text on the clipboard, also where the page came without TLS from another machine. Tells whether it did.
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { /* not allowed here: the older way */ }
  const focused = document.activeElement;
  const box = element("textarea", { value: text, className: "away" });
  document.body.append(box);
  box.select();
  const isDone = document.execCommand("copy");
  box.remove();
  focused?.focus();
  return isDone;
}

export function copyButton(text, name = "Copy") {
  const made = element("button", { type: "button", textContent: name });
  made.onclick = async () => {
    made.textContent = (await copy(text())) ? "Copied" : "Not allowed";
    setTimeout(() => { made.textContent = name; }, 1500);
  };
  return made;
}

export function download(name, kind, text) {
  const url = URL.createObjectURL(new Blob([text], { type: kind }));
  element("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

export async function problem(reply) {
  let said = "";
  try {
    const body = await reply.json();
    said = body.error?.message ?? body.error ?? "";
  } catch { /* no JSON */ }
  if (reply.status === 401) return "The server wants an API key: enter it in the settings.";
  return `${reply.status}: ${said || reply.statusText}`;
}

async function answer(url) {
  const reply = await fetch(url, { headers: headers() });
  if (!reply.ok) throw new Error(await problem(reply));
  return reply;
}

export const get = async (url) => (await answer(url)).json();
export const getText = async (url) => (await answer(url)).text();
