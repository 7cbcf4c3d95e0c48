// Markdown to nodes: markdown-it reads it, Temml sets formulas, highlight.js colours code. Nodes are made one by one
// from the parser's tokens, of known elements and attributes alone: no text of a model is ever read as HTML.

import { copyButton, element } from "./api.js";
import hljs from "./vendor/highlight/core.min.js";
import bash from "./vendor/highlight/bash.min.js";
import cpp from "./vendor/highlight/cpp.min.js";
import diff from "./vendor/highlight/diff.min.js";
import go from "./vendor/highlight/go.min.js";
import java from "./vendor/highlight/java.min.js";
import javascript from "./vendor/highlight/javascript.min.js";
import json from "./vendor/highlight/json.min.js";
import python from "./vendor/highlight/python.min.js";
import rust from "./vendor/highlight/rust.min.js";
import shell from "./vendor/highlight/shell.min.js";
import xml from "./vendor/highlight/xml.min.js";
import yaml from "./vendor/highlight/yaml.min.js";

const GRAMMARS = { bash, cpp, diff, go, java, javascript, json, python, rust, shell, xml, yaml };
for (const [name, grammar] of Object.entries(GRAMMARS)) hljs.registerLanguage(name, grammar);
hljs.registerAliases(["c", "h"], { languageName: "cpp" });
hljs.registerAliases(["ts", "tsx", "typescript"], { languageName: "javascript" });

const MAX_MARKDOWN = 400_000; // characters; a longer text is shown as it is
const MAX_COLOURED = 60_000, MAX_COLOURED_LINE = 400; // characters of code: the grammars are not linear in a line
const MAX_FORMULA = 4_000, MAX_FORMULAS = 500; // of one text; more are shown as they were written
const TAGS = new Set(["p", "ul", "ol", "li", "blockquote", "table", "thead", "tbody", "tr", "th", "td", "strong", "em", "s", "hr"]);
const SCHEMES = new Set(["http:", "https:", "mailto:"]);

// Characters that reorder others or hide a text are shown by their numbers. A flag may hold a few of the hidden ones.
const HIDDEN = /[\u202a-\u202e\u2066-\u2069]|\u{1f3f4}?[\u{e0000}-\u{e007f}]+|[\u200b\u2060\ufeff\u{e0100}-\u{e01ef}]{4,}/gu;
export const visible = (text) => text.replace(HIDDEN, (found) => {
  if (found.startsWith("\u{1f3f4}") && found.length <= 16) return found;
  if ([...found].length > 1) return `[${[...found].length} hidden characters]`;
  return `[U+${found.codePointAt(0).toString(16).toUpperCase()}]`;
});

// Formulas: \( \), $ $ inside a line, \[ \] and $$ $$ also over several.

const CLOSERS = { "\\[": "\\]", "$$": "$$", "\\(": "\\)", $: "$" };

// Where the closing mark stands; -1 if nowhere. No part of a text is looked through twice.
function closing(state, mark, from, end) {
  const known = (state.closers ??= {});
  if (!(known[mark]?.from <= from && from <= known[mark].at)) {
    const at = state.src.indexOf(mark, from);
    known[mark] = { from, at: at < 0 ? Infinity : at };
  }
  return known[mark].at < end ? known[mark].at : -1;
}

function inlineMath(state, silent) {
  const { src, pos } = state, one = src[pos];
  if (one !== "$" && one !== "\\") return false;
  const mark = src.startsWith("$$", pos) ? "$$" : one === "$" ? "$" : src.slice(pos, pos + 2);
  const close = CLOSERS[mark];
  if (!close) return false;
  const start = pos + mark.length, end = closing(state, close, start, state.posMax);
  if (end <= start) return false;
  // A price is no formula: neither space inside the marks, nor a digit after them.
  if (mark === "$" && (/\s/.test(src[start] + src[end - 1]) || /\d/.test(src[end + 1] ?? "") || src[end - 1] === "\\")) return false;
  if (!silent) {
    const token = state.push("math", "", 0);
    token.content = src.slice(start, end);
    token.info = mark === "\\[" || mark === "$$" ? "display" : "";
    token.markup = src.slice(pos, end + close.length);
  }
  state.pos = end + close.length;
  return true;
}

function blockMath(state, startLine, endLine, silent) {
  const begin = state.bMarks[startLine] + state.tShift[startLine];
  const mark = state.src.slice(begin, begin + 2), close = CLOSERS[mark];
  if (mark.length < 2 || !close || mark === "\\(") return false;
  const found = closing(state, close, begin + 2, state.eMarks[endLine - 1]);
  if (found < 0 && !state.env.isGrowing) return false;
  let line = startLine;
  while (line < endLine - 1 && (found < 0 || state.eMarks[line] < found)) line += 1;
  const end = found < 0 ? state.eMarks[line] : found;
  if (found >= 0 && state.src.slice(found + 2, state.eMarks[line]).trim()) return false; // a text goes on: not a block
  if (silent) return true;
  const token = state.push("math", "", 0);
  Object.assign(token, { block: true, info: "display", map: [startLine, line + 1], content: state.src.slice(begin + 2, end), markup: state.src.slice(begin, end + 2) });
  if (found < 0) token.meta = { isOpen: true };
  state.line = line + 1;
  return true;
}

const parser = globalThis.markdownit({ html: false, breaks: true, maxNesting: 40 });
parser.inline.ruler.before("escape", "math", inlineMath);
parser.block.ruler.before("fence", "math", blockMath, { alt: ["paragraph", "blockquote", "list"] });
parser.validateLink = () => true; // what may be followed is decided where a link is made

const formulas = new Map(); // of the last texts: they are drawn again while a text grows

// What is left of one text's bounds, and the level of the heading before: below a message's own, none is left out.
const budget = () => ({ formulas: MAX_FORMULAS, coloured: MAX_COLOURED, heading: 2 });

function formula(token, left) {
  const source = element("code", { textContent: visible(token.markup) });
  if (token.meta?.isOpen || token.content.length > MAX_FORMULA || left.formulas-- <= 0) return source;
  const key = token.info + token.content;
  if (!formulas.has(key)) {
    const made = element("span", { className: token.info ? "math display" : "math" });
    try {
      globalThis.temml.render(token.content, made, { displayMode: token.info !== "", throwOnError: true, trust: false, maxSize: [20, 20], maxExpand: 500 });
    } catch {
      made.replaceChildren(source);
    }
    for (const one of made.querySelectorAll("[href], [src], [id]")) for (const name of ["href", "src", "id"]) one.removeAttribute(name);
    if (token.info) made.tabIndex = 0;
    if (formulas.size >= MAX_FORMULAS) formulas.delete(formulas.keys().next().value);
    formulas.set(key, made);
  }
  return formulas.get(key).cloneNode(true);
}

function codeBlock(text, info, left) {
  const language = info.trim().split(/\s/, 1)[0].slice(0, 30);
  const code = element("code", { textContent: visible(text) });
  if (hljs.getLanguage(language) && (left.coloured -= text.length) > 0 && text.split("\n").every((line) => line.length < MAX_COLOURED_LINE)) {
    code.className = `language-${language.toLowerCase()}`;
    hljs.highlightElement(code);
  }
  const block = element("pre", { tabIndex: 0 }, code);
  return element("div", { className: "code" }, element("div", { className: "code-head" }, element("span", { textContent: visible(language) }), copyButton(() => text, "Copy code")), block);
}

// A link, if it may be followed; behind its text the host it leads to, unless that is what the text says.
function anchor(href) {
  let url = null;
  try { url = new URL(href); } catch { /* not a whole address */ }
  if (!url || !SCHEMES.has(url.protocol)) return element("span", { title: visible(href).slice(0, 2000) });
  return element("a", { href: url.href, title: visible(url.href).slice(0, 2000), rel: "noreferrer noopener", target: "_blank" });
}

function named(link) {
  const text = link.textContent;
  if (link.localName !== "a" || text === link.href || `${text}/` === link.href) return;
  link.append(element("span", { className: "host", textContent: ` (${link.host || link.pathname})` }));
}

function build(tokens, place, left) {
  const open = [place];
  for (const token of tokens) {
    const top = open.at(-1);
    if (token.hidden) continue;
    if (token.type === "inline") build(token.children, top, left);
    else if (token.type === "math") top.append(formula(token, left));
    else if (token.type === "fence" || token.type === "code_block") top.append(codeBlock(token.content, token.info, left));
    else if (token.type === "code_inline") top.append(element("code", { textContent: visible(token.content) }));
    else if (token.type === "softbreak" || token.type === "hardbreak") top.append(element("br"));
    else if (token.type === "image") {
      const link = anchor(token.attrGet("src") ?? "");
      link.append(`[image: ${visible(token.content)}]`);
      named(link);
      top.append(link);
    } else if (token.nesting < 0) {
      const closed = open.pop();
      if (token.type === "link_close") named(closed);
    } else if (token.type === "link_open") open.push(top.appendChild(anchor(token.attrGet("href") ?? "")));
    else if (token.nesting > 0 || token.type === "hr") {
      const level = /^h([1-6])$/.exec(token.tag)?.[1];
      if (level) left.heading = Math.min(6, Number(level) + 2, left.heading + 1);
      const made = element(level ? `h${left.heading}` : TAGS.has(token.tag) ? token.tag : "div");
      if (token.tag === "ol") made.start = Number(token.attrGet("start") ?? 1);
      if (token.tag === "td" || token.tag === "th") made.style.textAlign = /left|right|center/.exec(token.attrGet("style") ?? "")?.[0] ?? "";
      top.append(token.tag === "table" ? element("div", { className: "wide", tabIndex: 0 }, made) : made);
      if (token.nesting > 0) open.push(made);
    } else top.append(visible(token.content));
  }
}

// A text that grows. Blocks that what follows cannot change stay as they are, with a reader's selection in them; only
// the last one is read and drawn again, so a whole answer costs what its length costs.
export class Growing {
  constructor(place) {
    this.place = place;
    this.done = 0; // characters that are drawn for good
    this.rest = []; // nodes of the last block
    this.left = budget();
  }

  // Draws the text so far. The last time it is read as a whole, as a name of a link may be explained at its end.
  draw(text, isWhole = false) {
    if (isWhole || text.length > MAX_MARKDOWN) {
      this.place.replaceChildren(...render(text));
      return;
    }
    const source = text.slice(this.done), tokens = parser.parse(source, { isGrowing: true });
    let last = 0;
    tokens.forEach((token, i) => { if (token.level === 0 && token.nesting >= 0 && token.map) last = i; });
    const fixed = document.createDocumentFragment(), open = document.createDocumentFragment();
    build(tokens.slice(0, last), fixed, this.left);
    build(tokens.slice(last), open, { ...this.left });
    for (const node of this.rest) node.remove();
    this.rest = [...open.childNodes];
    this.place.append(fixed, open);
    const ends = /\r\n?|\n/g;
    for (let line = tokens[last]?.map[0] ?? 0; line > 0; line -= 1) ends.exec(source);
    this.done += ends.lastIndex;
  }
}

export function render(text) {
  if (text.length > MAX_MARKDOWN) return [element("pre", { tabIndex: 0, textContent: visible(text) })];
  const made = document.createDocumentFragment();
  build(parser.parse(text, {}), made, budget());
  return [...made.childNodes];
}
