// The panel "Server": how it does, as charts of /metrics, and which plugins are in use, as a picture.

import { element, get, getText } from "./api.js";

const SVG = "http://www.w3.org/2000/svg";
const MANY = 6, SECONDS = 2, POINTS = 60, WIDTH = 300, HEIGHT = 48;

const sum = (text, name, model) => {
  let found = null;
  for (const line of text.split("\n")) {
    if (line.startsWith(`${name}{`) && line.includes(`model_name="${model}"`)) found = (found ?? 0) + Number(line.slice(line.lastIndexOf(" ")));
  }
  return found;
};
const rate = (name) => (now, before, model, seconds) => {
  const [last, first] = [sum(now, name, model), before === null ? null : sum(before, name, model)];
  return last === null || first === null ? null : Math.max(0, last - first) / seconds;
};
const level = (name, factor = 1) => (now, _, model) => {
  const found = sum(now, name, model);
  return found === null ? null : factor * found;
};
const CHARTS = [
  ["Tokens out", "tokens/s", rate("fwk:generation_tokens_total")],
  ["Tokens in", "tokens/s", rate("fwk:prompt_tokens_total")],
  ["Found in the prefix cache", "tokens/s", rate("fwk:prefix_cache_hits_total")],
  ["Running", "sequences", level("fwk:num_requests_running")],
  ["Waiting", "sequences", level("fwk:num_requests_waiting")],
  ["KV cache in use", "%", level("fwk:kv_cache_usage_perc", 100)],
];

const shown = (value) => (value >= 100 || Number.isInteger(value) ? value.toFixed(0) : value.toFixed(1));

function drawing(name, settings, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(settings)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function line(title, unit, values) {
  const top = Math.max(1, ...values), last = values.at(-1) ?? 0;
  const points = values.map((value, i) => `${((i + POINTS - values.length) * WIDTH) / (POINTS - 1)},${HEIGHT - 2 - (value * (HEIGHT - 4)) / top}`);
  const told = `${title}: ${shown(last)} ${unit}`;
  const chart = drawing("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", class: "chart" },
    drawing("title", {}, `${told}, at most ${shown(Math.max(0, ...values))} in the last ${POINTS * SECONDS} seconds`),
    drawing("polyline", { points: points.join(" "), fill: "none" }));
  return element("figure", {}, element("figcaption", { textContent: told }), chart);
}

export class Charts {
  constructor(place) {
    this.place = place;
    this.values = CHARTS.map(() => []);
    this.before = null;
    this.timer = null;
  }

  start(model) {
    this.stop();
    this.timer = setInterval(() => this.step(model), 1000 * SECONDS);
    return this.step(model);
  }

  stop() {
    clearInterval(this.timer);
    this.timer = this.before = null;
  }

  async step(model) {
    let now;
    try {
      now = await getText("/metrics");
    } catch (error) {
      this.place.replaceChildren(element("p", { className: "hint", textContent: `No metrics: ${error.message}` }));
      return;
    }
    CHARTS.forEach(([, , read], i) => {
      const value = read(now, this.before, model, SECONDS);
      if (value !== null) this.values[i] = [...this.values[i], value].slice(-POINTS);
    });
    this.before = now;
    this.place.replaceChildren(...CHARTS.map(([title, unit], i) => line(title, unit, this.values[i])));
  }
}

// A row for each family: what is used, and what was refused with the reason folded into it.
function family([name, chosen], refused) {
  const off = Object.entries(refused ?? {}).map(([other, why]) =>
    element("details", { className: "chip off" }, element("summary", { textContent: other }), why));
  const folded = off.length > MANY ? [element("details", { className: "chip off" }, element("summary", { textContent: `${off.length} others` }), ...off)] : off;
  return element("li", {},
    element("span", { className: "family", textContent: name }),
    element("span", { className: "chip on", textContent: chosen, title: "in use" }), ...folded);
}

export async function why(place, model) {
  try {
    const info = await get(`/server_info?model=${encodeURIComponent(model)}`);
    const rows = Object.entries(info.chosen ?? {}).sort().map((one) => family(one, info.refused?.[one[0]]));
    place.replaceChildren(
      element("p", { textContent: `fwk ${info.version}; context: ${info.max_model_len ?? "?"} tokens` }),
      element("p", { className: "hint", textContent: "Solid: in use. Dashed: refused; open one to read why." }),
      element("ul", { className: "why" }, ...rows),
      ...(info.reasons ?? []).map((text) => element("p", { className: "hint", textContent: text })),
      ...(info.models ?? []).map((one) => element("p", { className: "hint", textContent: `${one.name}: ${one.asleep ? "asleep" : "loaded"}` })),
    );
  } catch (error) {
    place.replaceChildren(element("p", { className: "error", textContent: error.message }));
  }
}
