// What the pages share: nodes, the key, and requests of the server they come from.

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

export function keepKey(changed) {
  $("key").value = sessionStorage.getItem("fwk-key") ?? "";
  $("key").onchange = () => {
    sessionStorage.setItem("fwk-key", $("key").value);
    changed();
  };
}

export function themes() {
  const kept = sessionStorage.getItem("fwk-theme");
  if (kept) document.documentElement.dataset.theme = kept;
  $("theme").onclick = () => {
    const now = document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
    sessionStorage.setItem("fwk-theme", document.documentElement.dataset.theme);
  };
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
