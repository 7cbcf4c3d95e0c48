// /docs: the routes of /openapi.json, their fields, and a form to try each.

import { $, element, get, headers, keepKey, themes } from "./api.js";

let spec = {};

const resolved = (schema) => {
  for (let hops = 0; schema?.$ref && hops < 20; hops += 1) schema = spec.components?.schemas?.[schema.$ref.split("/").at(-1)];
  return schema ?? {};
};

function kind(schema) {
  if (schema.$ref) return schema.$ref.split("/").at(-1);
  const options = schema.anyOf ?? schema.oneOf;
  if (options) return options.map(kind).join(" or ");
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" | ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.type === "array") return `array of ${kind(schema.items ?? {})}`;
  return Array.isArray(schema.type) ? schema.type.join(" or ") : (schema.type ?? "any");
}

function bounds(schema) {
  const parts = [["minimum", "at least"], ["exclusiveMinimum", "above"], ["maximum", "at most"], ["exclusiveMaximum", "below"],
    ["minLength", "at least so many characters:"], ["maxLength", "at most so many characters:"], ["maxItems", "at most so many items:"]];
  const told = parts.filter(([name]) => schema[name] !== undefined).map(([name, word]) => `${word} ${schema[name]}`);
  if (schema.default !== undefined && schema.default !== null) told.push(`default ${JSON.stringify(schema.default)}`);
  return told.join(", ");
}

function fields(schema, depth = 0) {
  const found = resolved(schema);
  const rows = Object.entries(found.properties ?? {}).map(([name, one]) => {
    const own = resolved(one), needed = found.required?.includes(name) ? " (required)" : "";
    const row = element("li", {}, element("code", { textContent: name }), ` ${kind(one)}${needed} `, element("span", { className: "hint", textContent: [bounds(own), own.description].filter(Boolean).join(". ") }));
    const inner = [one, one.items, ...(one.anyOf ?? []), ...(one.anyOf ?? []).map((other) => other.items)].filter((other) => other?.$ref && resolved(other).properties);
    if (depth < 3) for (const other of inner) row.append(element("details", {}, element("summary", { textContent: kind(other) }), fields(other, depth + 1)));
    return row;
  });
  return element("ul", { className: "fields" }, ...rows);
}

function trial(path, method, operation) {
  const names = [...path.matchAll(/\{(\w+)[^}]*\}/g)].map((match) => match[1]);
  const inputs = names.map((name) => element("input", { type: "text", ariaLabel: name, placeholder: name }));
  const hasBody = operation.requestBody !== undefined;
  const body = element("textarea", { rows: 6, ariaLabel: "Body", spellcheck: false, value: "{}" });
  const out = element("pre", { tabIndex: 0, hidden: true, ariaLive: "polite" });
  const send = async () => {
    let url = path;
    names.forEach((name, i) => { url = url.replace(new RegExp(`\\{${name}[^}]*\\}`), encodeURIComponent(inputs[i].value)); });
    out.hidden = false;
    out.textContent = "...";
    try {
      const reply = await fetch(url, { method: method.toUpperCase(), headers: headers(), ...(hasBody ? { body: body.value } : {}) });
      const text = await reply.text();
      let told = text;
      try { told = JSON.stringify(JSON.parse(text), null, 2); } catch { /* as it is */ }
      out.textContent = `${reply.status} ${reply.statusText}\n\n${told.slice(0, 100000)}`;
    } catch (error) {
      out.textContent = error.message;
    }
  };
  return element("div", { className: "trial" }, ...inputs, ...(hasBody ? [body] : []), element("button", { type: "button", textContent: "Send", onclick: send }), out);
}

function route(path, method, operation) {
  const made = element("details", { className: "route" },
    element("summary", {}, element("strong", { textContent: method.toUpperCase() }), " ", element("code", { textContent: path }), ` ${operation.summary ?? ""}`));
  made.dataset.text = `${method} ${path} ${operation.summary ?? ""} ${operation.description ?? ""}`.toLowerCase();
  made.ontoggle = () => {  // built when it is looked at
    if (!made.open || made.children.length > 1) return;
    if (operation.description) made.append(element("p", { textContent: operation.description }));
    for (const content of Object.values(operation.requestBody?.content ?? {}).slice(0, 1)) made.append(element("h2", { textContent: "Body" }), fields(content.schema));
    const parameters = (operation.parameters ?? []).map((one) => element("li", {}, element("code", { textContent: one.name }), ` ${one.in}, ${kind(one.schema ?? {})} ${one.description ?? ""}`));
    if (parameters.length) made.append(element("h2", { textContent: "Parameters" }), element("ul", {}, ...parameters));
    const replies = Object.entries(operation.responses ?? {}).map(([status, one]) => element("li", {}, element("code", { textContent: status }), ` ${one.description ?? ""}`));
    made.append(element("h2", { textContent: "Replies" }), element("ul", {}, ...replies), element("h2", { textContent: "Try it" }), trial(path, method, operation));
  };
  return made;
}

function filter() {
  const wanted = $("filter").value.toLowerCase();
  for (const one of document.querySelectorAll(".route")) one.hidden = !one.dataset.text.includes(wanted);
}

async function load() {
  try {
    spec = await get("/openapi.json");
    const all = Object.entries(spec.paths ?? {}).flatMap(([path, methods]) => Object.entries(methods).map(([method, operation]) => route(path, method, operation)));
    $("routes").replaceChildren(...all);
    $("state").textContent = `${all.length} routes`;
    filter();
  } catch (error) {
    $("state").textContent = error.message;
  }
}

themes();
keepKey(load);
$("filter").oninput = filter;
load();
