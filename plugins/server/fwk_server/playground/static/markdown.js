// Markdown to nodes: headings, lists, tables, fenced code, code, bold, italic, links. Text is never read as HTML.

function element(name, ...children) {
  const made = document.createElement(name);
  for (const child of children.flat()) made.append(child);  // not spread: there may be more than a call can have
  return made;
}

// The next place of a pattern, for places that only grow: no part of a text is looked through twice.
function finder(text, pattern) {
  let found = -1;
  return (from) => {
    if (found < from) {
      pattern.lastIndex = from;
      found = pattern.exec(text)?.index ?? text.length;
    }
    return found;
  };
}

// Where runs of backticks of each length start, in order.
function backtickRuns(text) {
  const runs = new Map();
  for (const { 0: run, index } of text.matchAll(/`+/g)) {
    if (!runs.has(run.length)) runs.set(run.length, []);
    runs.get(run.length).push(index);
  }
  return runs;
}

function anchor(text, url) {
  const link = element("a", text);
  link.href = url;
  link.rel = "noreferrer noopener";
  link.target = "_blank";
  return link;
}

function inline(text) {
  const nodes = [], runs = backtickRuns(text);
  const special = finder(text, /[`*[]/g), star = finder(text, /[*\n]/g);
  const closing = finder(text, /[\]\n]/g), end = finder(text, /[\s)]/g);
  let done = 0;

  // What starts at a special character: its node and its end; only an end where it is text.
  function piece(at) {
    if (text[at] === "`") {
      let inner = at;
      while (text[inner] === "`") inner += 1;
      const same = runs.get(inner - at);
      while (same[0] < inner) same.shift();
      return same.length ? [same[0] + inner - at, element("code", text.slice(inner, same[0]).trim())] : [inner];
    }
    if (text[at] === "*") {
      const isStrong = text[at + 1] === "*", inner = at + 1 + isStrong, stop = star(inner);
      const isClosed = text[stop] === "*" && stop > inner && (isStrong ? text[stop + 1] === "*" : !/\s/.test(text[inner]));
      if (!isClosed) return [at + 1];
      return [stop + 1 + isStrong, element(isStrong ? "strong" : "em", inline(text.slice(inner, stop)))];
    }
    const stop = closing(at + 1);
    const isLink = stop > at + 1 && ["](http://", "](https://"].some((start) => text.startsWith(start, stop));
    if (!isLink) return [at + 1];
    const close = end(stop + 2);
    return text[close] === ")" ? [close + 1, anchor(text.slice(at + 1, stop), text.slice(stop + 2, close))] : [at + 1];
  }

  for (let at = special(0); at < text.length; ) {
    const [next, node] = piece(at);
    if (node) {
      if (done < at) nodes.push(text.slice(done, at));
      nodes.push(node);
      done = next;
    }
    at = special(next);
  }
  if (done < text.length) nodes.push(text.slice(done));
  return nodes;
}

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());

// Patterns end in [^]*, which always fits: one that could fail there would be tried at each place before it.
const FENCE = /^\s*(```+|~~~+)[^]*/, HEADING = /^(#{1,6})\s+([^]*)/, ITEM = /^\s*([-*+]|\d{1,9}[.)])\s+([^]*)/;
const isRuler = (line) => line.includes("|") && line.includes("-") && /^[\s:|-]+$/.test(line);

export function render(text) {
  const lines = text.split("\n"), nodes = [];
  let at = 0, paragraph = [];
  const close = () => {
    if (paragraph.length) nodes.push(element("p", inline(paragraph.join("\n"))));
    paragraph = [];
  };
  while (at < lines.length) {
    const line = lines[at];
    const fence = FENCE.exec(line), heading = HEADING.exec(line), item = ITEM.exec(line);
    if (fence) {
      close();
      const code = [];
      for (at += 1; at < lines.length && !lines[at].trim().startsWith(fence[1]); at += 1) code.push(lines[at]);
      const block = element("pre", element("code", code.join("\n")));
      block.tabIndex = 0;
      nodes.push(block);
    } else if (heading) {
      close();
      nodes.push(element(`h${Math.min(6, heading[1].length + 2)}`, inline(heading[2])));
    } else if (item) {
      close();
      const isOrdered = /\d/.test(item[1]), list = element(isOrdered ? "ol" : "ul");
      if (isOrdered) list.start = parseInt(item[1], 10);
      for (let next = item; next; next = at + 1 < lines.length ? ITEM.exec(lines[at + 1]) : null) {
        if (next !== item) at += 1;
        list.append(element("li", inline(next[2])));
      }
      nodes.push(list);
    } else if (line.includes("|") && isRuler(lines[at + 1] ?? "")) {
      close();
      const table = element("table", element("tr", cells(line).map((cell) => element("th", inline(cell)))));
      for (at += 2; at < lines.length && lines[at].includes("|"); at += 1) {
        table.append(element("tr", cells(lines[at]).map((cell) => element("td", inline(cell)))));
      }
      nodes.push(table);
      at -= 1;
    } else if (line.trim()) paragraph.push(line);
    else close();
    at += 1;
  }
  close();
  return nodes;
}
