import { $, element, get, headers, keepKey, problem, themes } from "/playground/api.js";
import { render } from "/playground/markdown.js";
import { Charts, why } from "/playground/server.js";

const PANELS = ["settings", "server"];
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];

// A chat is a tree: an edit or another try is a sibling, and each node knows which of its children is shown.
const root = { children: [], shown: 0 };
let running = null; // AbortController of the stream under way
let model = null, models = new Map();
const charts = new Charts($("charts"));

function path() {
  const nodes = [];
  for (let node = root; node.children.length; ) {
    node = node.children[node.shown];
    nodes.push(node);
  }
  return nodes;
}

function add(parent, node) {
  parent.children.push({ children: [], shown: 0, parent, ...node });
  parent.shown = parent.children.length - 1;
  return parent.children[parent.shown];
}

// The API

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
  const system = $("system").value.trim();
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const node of nodes) {
    const message = { role: node.role, content: node.content };
    if (node.calls?.length) message.tool_calls = node.calls;
    if (node.role === "tool") message.tool_call_id = node.call;
    messages.push(message);
  }
  const body = { model, messages, stream: true, stream_options: { include_usage: true } };
  for (const name of NUMBERS) if ($(name).value !== "") body[name] = Number($(name).value);
  if ($("logprobs").checked) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  const schema = parsed("schema", "object"), tools = parsed("tools", "array");
  if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  if (tools) body.tools = tools;
  return body;
}

async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      yield JSON.parse(line.slice(6));
    }
  }
}

function take(node, event) {
  if (event.error) throw new Error(event.error.message ?? String(event.error));
  if (event.usage) node.usage = event.usage;
  const choice = event.choices?.[0];
  if (!choice) return;
  const delta = choice.delta ?? {};
  if (delta.content) node.content += delta.content;
  if (delta.reasoning_content) node.thinking += delta.reasoning_content;
  for (const part of delta.tool_calls ?? []) {
    const call = (node.calls[part.index] ??= { id: part.id, type: "function", function: { name: "", arguments: "" } });
    call.function.name += part.function?.name ?? "";
    call.function.arguments += part.function?.arguments ?? "";
  }
  node.tokens.push(...(choice.logprobs?.content ?? []));
  if (choice.finish_reason) node.reason = choice.finish_reason;
}

async function answer(parent) {
  const node = { role: "assistant", content: "", thinking: "", calls: [], tokens: [], reason: "", error: "" };
  const nodes = path();
  const own = add(parent, node);
  running = new AbortController();
  const start = performance.now();
  let first = 0, drawn = 0;
  show();
  try {
    const body = request(nodes.slice(0, nodes.indexOf(parent) + 1));
    const reply = await fetch("/v1/chat/completions", { method: "POST", headers: headers(), body: JSON.stringify(body), signal: running.signal });
    if (!reply.ok) throw new Error(await problem(reply));
    for await (const event of events(reply)) {
      first ||= event.choices?.length ? performance.now() : 0;
      take(own, event);
      if (performance.now() - drawn > 60) {
        draw(own);
        drawn = performance.now();
      }
    }
  } catch (error) {
    if (error.name === "AbortError") own.reason = "stopped";
    else own.error = error.message;
  }
  const end = performance.now(), count = own.usage?.completion_tokens;
  own.stats = first ? `first token ${((first - start) / 1000).toFixed(2)} s` : "";
  if (count > 1 && end > first) own.stats += `, ${(((count - 1) * 1000) / (end - first)).toFixed(1)} tokens/s`;
  if (own.usage) {
    const cached = own.usage.prompt_tokens_details?.cached_tokens ?? 0;
    own.stats += `, ${own.usage.prompt_tokens} tokens in (${cached} from the cache), ${count} out`;
  }
  if (own.reason && own.reason !== "stop") own.stats += `, ended: ${own.reason}`;
  running = null;
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
    const span = element("span", { className: `token${level}`, textContent: token.token, tabIndex: 0 });
    span.onmouseenter = span.onfocus = () => {
      told.textContent = [token, ...(token.top_logprobs ?? []).filter((other) => other.token !== token.token)]
        .map((one) => `${JSON.stringify(one.token)} ${(100 * Math.exp(one.logprob)).toFixed(1)} %`).join("   ");
    };
    line.append(span);
  }
  return [line, told];
}

function results(node) {
  return node.calls.filter(Boolean).map((call) => {
    const input = element("input", { type: "text", ariaLabel: `Result of ${call.function.name}`, placeholder: "result" });
    const send = () => {
      let last = node;
      while (last.children.length && last.children[last.shown].role === "tool") last = last.children[last.shown];
      const told = add(last, { role: "tool", content: input.value, call: call.id, name: call.function.name });
      const given = path().filter((one) => one.role === "tool").map((one) => one.call);
      if (node.calls.every((one) => !one || given.includes(one.id))) answer(told);
      else show();
    };
    return element("div", {}, element("code", { textContent: `${call.function.name}(${call.function.arguments})` }),
      element("div", { className: "result" }, input, button("Give result", send)));
  });
}

function draw(node) {
  if (!node.place) return;
  const log = $("log"), isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
  const body = element("div", { className: "body" });
  if (node.thinking) {
    const folded = element("details", { open: node.isOpen ?? false }, element("summary", { textContent: "Thinking" }), ...render(node.thinking));
    folded.ontoggle = () => { node.isOpen = folded.open; };
    body.append(folded);
  }
  if (node.role === "assistant") body.append(...(node.tokens.length ? tokens(node) : render(node.content)));
  else body.append(node.content);
  if (node.calls?.length && !running) body.append(...results(node));
  if (node.error) body.append(element("p", { className: "error", role: "alert", textContent: node.error }));
  node.place.querySelector(".body").replaceWith(body);
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

function edit(node) {
  const box = element("textarea", { value: node.content, rows: 4, ariaLabel: "Edited message" });
  const save = () => answer(add(node.parent, { role: "user", content: box.value }));
  node.place.querySelector(".body").replaceChildren(box, button("Send edited", save), button("Leave as it was", show));
  box.focus();
}

function foot(node) {
  const made = element("div", { className: "foot" });
  const siblings = node.parent.children, at = siblings.indexOf(node);
  const turn = (by) => () => { node.parent.shown = at + by; show(); };
  if (siblings.length > 1) {
    const [back, on] = [button("‹", turn(-1)), button("›", turn(1))];
    [back.ariaLabel, on.ariaLabel] = ["Version before", "Next version"];
    back.disabled ||= at === 0;
    on.disabled ||= at === siblings.length - 1;
    made.append(back, element("span", { textContent: `${at + 1} of ${siblings.length}` }), on);
  }
  if (node.role === "user") made.append(button("Edit", () => edit(node)));
  if (node.role === "assistant") {
    made.append(button("Try again", () => answer(node.parent)), button("Copy", () => navigator.clipboard?.writeText(node.content)));
    if (node.stats) made.append(element("span", { textContent: node.stats.replace(/^, /, "") }));
  }
  return made;
}

function show() {
  const names = { user: "You", assistant: "Model", tool: "Result of a tool" };
  const articles = path().map((node) => {
    node.place = element("article", { className: `message ${node.role}` },
      element("p", { className: "who", textContent: node.name ? `${names[node.role]}: ${node.name}` : names[node.role] }),
      element("div", { className: "body" }), foot(node));
    return node.place;
  });
  $("log").replaceChildren(...articles);
  path().forEach(draw);
  $("log").scrollTop = $("log").scrollHeight;
  $("send").hidden = $("new").disabled = running !== null;
  $("stop").hidden = running === null;
}

async function connect() {
  try {
    const { data } = await get("/v1/models");
    const usable = data.filter((one) => (one.task ?? "generate") === "generate");
    const kept = $("model").value;
    models = new Map((usable.length ? usable : data).map((one) => [one.id, one]));
    $("model").replaceChildren(...[...models.keys()].map((id) => element("option", { value: id, textContent: id })));
    if (models.has(kept)) $("model").value = kept;
    choose();
  } catch (error) {
    $("state").textContent = error.message;
    setTimeout(() => { if (!model) connect(); }, 3000);
  }
}

function choose() {
  model = $("model").value;
  const length = models.get(model)?.max_model_len;
  $("state").textContent = length ? `${length} tokens of context` : "";
  if (!$("server").hidden) look();
}

function look() {
  charts.values = charts.values.map(() => []);
  charts.start(models.get(model)?.root ?? model);
  why($("facts"), model);
}

function panel(name) {
  $(`show-${name}`).onclick = () => {
    for (const one of PANELS) {
      $(one).hidden = one !== name || !$(one).hidden;
      $(`show-${one}`).ariaExpanded = String(!$(one).hidden);
    }
    if ($("server").hidden) charts.stop();
    else look();
  };
}

$("ask").onsubmit = (event) => {
  event.preventDefault();
  const text = $("input").value;
  if (!text.trim() || running) return;
  $("input").value = "";
  answer(add(path().at(-1) ?? root, { role: "user", content: text }));
};
$("input").onkeydown = (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("ask").requestSubmit();
};
$("stop").onclick = () => running?.abort();
$("new").onclick = () => { root.children = []; show(); $("input").focus(); };
for (const [id, wanted] of [["schema", "object"], ["tools", "array"]]) {
  $(id).onchange = () => { try { parsed(id, wanted); } catch { /* it is shown */ } };
}
document.onkeydown = (event) => {
  if (event.key === "Escape" && running) running.abort();
};
$("model").onchange = choose;
themes();
keepKey(connect);
PANELS.forEach(panel);
connect();
$("input").focus();
