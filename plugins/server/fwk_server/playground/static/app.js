import { $, copyButton, element, get, keepKey, themes } from "./api.js";
import { Chat } from "./chat.js";
import { History } from "./history.js";
import { Images } from "./images.js";
import { Growing, visible } from "./markdown.js";
import { fromChat, takeItem } from "./responses.js";
import { Charts, why } from "./server.js";
import * as store from "./store.js";
import { messages, stream, takeChunk } from "./stream.js";
import { ToolServers, asked, made, waiting } from "./tools.js";

const PANELS = ["settings", "server"];
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];
const KEPT = [...NUMBERS, "system", "schema", "tools"];
const TRY = [
  "Why is the sky blue? Answer in three sentences.",
  "Write a Python function that tells whether a word is a palindrome.",
  "Compare tea and coffee in a table.",
];
const DRAW_MS = 60, SAVE_MS = 2000;

let chat = new Chat();
let running = null; // AbortController of the stream under way
let model = null, models = new Map();
const tell = (text) => { $("state").textContent = text; };
const charts = new Charts($("charts"));
const images = new Images(tell);
const history = new History(() => chat, open, tell);
const servers = new ToolServers(() => keepSettings());

// Settings

function parsed(id, wanted) {
  const text = $(id).value.trim();
  $(`${id}-error`).textContent = "";
  if (!text) return null;
  try {
    const value = JSON.parse(text);
    if (wanted === "array" ? !Array.isArray(value) : typeof value !== "object" || value === null || Array.isArray(value)) {
      throw new Error(`it must be a JSON ${wanted}`);
    }
    return value;
  } catch (error) {
    $(`${id}-error`).textContent = error.message;
    throw new Error(`${id === "schema" ? "The JSON schema" : "The tools"} cannot be read: ${error.message}`);
  }
}

function request(nodes) {
  const body = { model, messages: messages(nodes, $("system").value.trim()) };
  for (const name of NUMBERS) if ($(name).value !== "") body[name] = Number($(name).value);
  if ($("logprobs").checked) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  const schema = parsed("schema", "object"), tools = parsed("tools", "array");
  if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  if (tools) body.tools = tools;
  const entries = servers.entries();
  if (entries.length) return { url: "/v1/responses", body: fromChat(body, nodes, $("system").value.trim(), entries), take: takeItem };
  return { url: "/v1/chat/completions", body: { ...body, stream_options: { include_usage: true } }, take: takeChunk };
}

function keepSettings() {
  const values = Object.fromEntries(KEPT.map((id) => [id, $(id).value]));
  store.put("settings", { id: "settings", ...values, logprobs: $("logprobs").checked, servers: [...servers.chosen], reads: $("tool-reads").checked, model }).catch((error) => tell(`Settings are not kept: ${error.message}`));
}

async function loadSettings() {
  const kept = (await store.all("settings").catch(() => []))[0];
  if (!kept) return null;
  for (const id of KEPT) if ($(id).value === "") $(id).value = kept[id] ?? "";
  $("logprobs").checked = kept.logprobs === true;
  $("tool-reads").checked = kept.reads === true;
  servers.chosen = new Set(kept.servers ?? []);
  return kept.model;
}

// Chats

function open(wanted) {
  running?.abort();
  chat = wanted;
  show();
  history.draw();
  $("input").focus();
}

function answer(parent) {
  const node = chat.add(parent, { role: "assistant", content: "", thinking: "", calls: [], tokens: [], reason: "", error: "" });
  return write(node, parent);
}

// Has the model write into node, with all that was said up to last.
async function write(node, last) {
  const own = chat, before = own.path();
  const control = (running = new AbortController());
  let next = 0, saved = performance.now();
  show();
  history.keep(own);
  await stream(node, () => request(before.slice(0, before.indexOf(last) + 1)), control.signal, () => {
    const now = performance.now();
    if (now < next) return;
    draw(node);
    next = performance.now() + Math.max(DRAW_MS, 4 * (performance.now() - now)); // drawing has a fifth of the time
    if (now - saved < SAVE_MS) return;
    saved = now;
    history.keep(own);
  });
  if (running === control) running = null;
  history.keep(own);
  if (own !== chat) return;
  show();
  $("input").focus();
}

// The page

function button(text, action) {
  return element("button", { type: "button", textContent: text, onclick: action, disabled: running !== null });
}

function tokens(node) {
  const told = element("p", { className: "alternatives", textContent: "Point at a token, or move to it with Tab." });
  const line = element("div", { className: "tokens" });
  for (const token of node.tokens) {
    const share = Math.exp(token.logprob);
    const level = share > 0.8 ? "" : share > 0.4 ? " p1" : share > 0.1 ? " p2" : " p3";
    const span = element("span", { className: `token${level}`, textContent: visible(token.token), tabIndex: 0 });
    span.onmouseenter = span.onfocus = () => {
      told.textContent = [token, ...(token.top_logprobs ?? []).filter((other) => other.token !== token.token)]
        .map((one) => `${visible(JSON.stringify(one.token))} ${(100 * Math.exp(one.logprob)).toFixed(1)} %`).join("   ");
    };
    line.append(span);
  }
  return [line, told];
}

function results(node) {
  return node.calls.filter(Boolean).map((call) => {
    const name = visible(call.function.name);
    const input = element("input", { type: "text", ariaLabel: `Result of ${name}`, placeholder: "result" });
    const send = () => {
      let last = node;
      while (last.children.length && last.children[last.shown].role === "tool") last = last.children[last.shown];
      const told = chat.add(last, { role: "tool", content: input.value, call: call.id, name: call.function.name });
      const given = chat.path().filter((one) => one.role === "tool").map((one) => one.call);
      if (node.calls.every((one) => !one || given.includes(one.id))) answer(told);
      else show();
    };
    return element("div", {}, element("code", { textContent: `${name}(${visible(call.function.arguments)})` }),
      element("div", { className: "result" }, input, button("Give result", send)));
  });
}

// What the person says of a call that waits; the answer continues when all are answered.
function decide(node) {
  return (item, approve) => {
    if (running) return;
    node.answers = { ...node.answers, [item.id]: approve };
    history.keep(chat);
    if (waiting(node).length) return show();
    Object.assign(node, { reason: "", error: "" });
    write(node, node);
  };
}

// The parts of an answer that grow while it is streamed.
function view(node, body) {
  const thinking = element("div"), text = element("div", { className: "text" }), calls = element("div");
  const folded = element("details", { open: node.isOpen ?? false }, element("summary", { textContent: "Thinking" }), thinking);
  folded.ontoggle = () => { node.isOpen = folded.open; };
  body.append(calls, text);
  return { folded, calls, thinking: new Growing(thinking), text: new Growing(text) };
}

function draw(node) {
  const body = node.place?.querySelector(".body");
  if (!body?.isConnected) return;
  const log = $("log"), isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  const isWhole = running === null || node.reason !== "";
  if (node.role === "assistant") {
    node.view ??= view(node, body);
    if (node.thinking && !node.view.folded.isConnected) body.prepend(node.view.folded);
    if (node.thinking) node.view.thinking.draw(node.thinking, isWhole);
    const calls = made(node);
    if (calls.length > node.view.calls.childElementCount) node.view.calls.append(...calls.slice(node.view.calls.childElementCount));
    if (node.tokens.length) node.view.text.place.replaceChildren(...tokens(node));
    else node.view.text.draw(node.content, isWhole);
  } else body.append(visible(node.content));
  const pictures = (node.images ?? []).map((url, i) => element("img", { src: url, alt: `image ${i + 1} of this message` }));
  if (pictures.length) body.append(element("div", { className: "pictures" }, ...pictures));
  if (node.calls?.length && !running) body.append(...results(node));
  if (!running && node === chat.path().at(-1)) body.append(...asked(node, decide(node)));
  if (node.error) body.append(element("p", { className: "error", role: "alert", textContent: node.error }));
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

function edit(node) {
  const box = element("textarea", { value: node.content, rows: 4, ariaLabel: "Edited message" });
  const save = () => answer(chat.add(node.parent, { role: "user", content: box.value, images: node.images }));
  node.place.querySelector(".body").replaceChildren(box, button("Send edited", save), button("Leave as it was", show));
  box.focus();
}

function foot(node) {
  const made = element("div", { className: "foot" });
  const siblings = node.parent.children, at = siblings.indexOf(node);
  const turn = (by) => () => { node.parent.shown = at + by; history.keep(chat); show(); };
  if (siblings.length > 1) {
    const [back, on] = [button("‹", turn(-1)), button("›", turn(1))];
    [back.ariaLabel, on.ariaLabel] = ["Version before", "Next version"];
    back.disabled ||= at === 0;
    on.disabled ||= at === siblings.length - 1;
    made.append(back, element("span", { textContent: `${at + 1} of ${siblings.length}` }), on);
  }
  if (node.role === "user") made.append(button("Edit", () => edit(node)));
  if (node.role === "assistant") {
    made.append(button("Try again", () => answer(node.parent)), copyButton(() => node.content));
    if (node.stats) made.append(element("span", { textContent: node.stats }));
  }
  return made;
}

function start() {
  const say = (text) => () => { if (!running && model) answer(chat.add(chat.root, { role: "user", content: text })); };
  return element("section", { className: "start", ariaLabel: "Things to try" },
    element("h2", { textContent: "Things to try" }), ...TRY.map((text) => element("button", { type: "button", textContent: text, onclick: say(text) })));
}

function show() {
  const names = { user: "You", assistant: "Model", tool: "Result of a tool" };
  const articles = chat.path().map((node) => {
    node.view = null;
    node.place = element("article", { className: `message ${node.role}` },
      element("h2", { className: "who", textContent: node.name ? `${names[node.role]}: ${visible(node.name)}` : names[node.role] }),
      element("div", { className: "body" }), foot(node));
    return node.place;
  });
  $("log").replaceChildren(...(articles.length ? articles : [start()]));
  chat.path().forEach(draw);
  $("log").scrollTop = $("log").scrollHeight;
  $("send").hidden = running !== null;
  $("stop").hidden = running === null;
}

async function connect(wanted) {
  try {
    const { data } = await get("/v1/models");
    const usable = data.filter((one) => (one.task ?? "generate") === "generate");
    const kept = $("model").value || wanted;
    models = new Map((usable.length ? usable : data).map((one) => [one.id, one]));
    $("model").replaceChildren(...[...models.keys()].map((id) => element("option", { value: id, textContent: id })));
    if (models.has(kept)) $("model").value = kept;
    tell("");
    choose();
  } catch (error) {
    tell(error.message);
    setTimeout(() => { if (!model) connect(wanted); }, 3000);
  }
}

function choose() {
  model = $("model").value;
  const found = models.get(model);
  $("model").title = found?.max_model_len ? `${found.max_model_len} tokens of context` : "";
  images.allow(found?.capabilities?.includes("vision") ?? false);
  if (!$("server").hidden) look();
}

function look() {
  charts.values = charts.values.map(() => []);
  charts.start(models.get(model)?.root ?? model);
  why($("facts"), model);
}

function toggle(name, isShown) {
  $(name).hidden = !isShown;
  $(`show-${name}`).ariaExpanded = String(isShown);
}

const narrow = matchMedia("(max-width: 45rem)");
const isNarrow = () => narrow.matches;
narrow.onchange = () => { if (isNarrow()) toggle("chats", false); }; // a window was made small, with the list open

function panel(name) {
  $(`show-${name}`).onclick = () => {
    for (const one of PANELS) toggle(one, one === name && $(one).hidden);
    if (isNarrow()) toggle("chats", false);
    if ($("server").hidden) charts.stop();
    else look();
  };
}

$("ask").onsubmit = (event) => {
  event.preventDefault();
  const text = $("input").value;
  if ((!text.trim() && !images.urls.length) || running) return;
  tell("");
  $("input").value = "";
  const pictures = images.take();
  answer(chat.add(chat.path().at(-1) ?? chat.root, { role: "user", content: text, ...(pictures.length ? { images: pictures } : {}) }));
};
$("input").onkeydown = (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("ask").requestSubmit();
};
$("stop").onclick = () => running?.abort();
$("new").onclick = () => open(new Chat());
$("show-chats").onclick = () => {
  toggle("chats", $("chats").hidden);
  if (isNarrow()) for (const one of PANELS) toggle(one, false);
};
$("menu").onclick = () => {
  const isOpen = $("nav").classList.toggle("open");
  $("menu").ariaExpanded = String(isOpen);
};
$("nav").onclick = () => {
  $("nav").classList.remove("open");
  $("menu").ariaExpanded = "false";
};
for (const [id, wanted] of [["schema", "object"], ["tools", "array"]]) {
  $(id).onchange = () => { try { parsed(id, wanted); } catch { /* it is shown */ } };
}
for (const id of [...KEPT, "logprobs"]) $(id).addEventListener("change", keepSettings);
document.onkeydown = (event) => {
  if (event.key === "Escape" && running) running.abort();
};
document.onvisibilitychange = () => { if (!document.hidden && !running) history.load(); }; // another tab may have changed them
$("model").onchange = () => { choose(); keepSettings(); };
themes();
PANELS.forEach(panel);
toggle("chats", matchMedia("(min-width: 64rem)").matches);
show();
loadSettings().then((wanted) => {
  const begin = () => { connect(wanted); servers.load(); };
  keepKey(begin);
  begin();
});
history.load();
$("input").focus();
