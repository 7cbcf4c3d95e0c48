// Markdown to nodes: headings, lists, tables, fenced code, code, bold, italic, links. Text is never read as HTML.

const INLINE = /(`+)([\s\S]+?)\1|\*\*([^*\n]+)\*\*|\*([^*\s][^*\n]*)\*|\[([^\]\n]+)\]\((https?:\/\/[^\s)]+)\)/;

function element(name, ...children) {
  const made = document.createElement(name);
  made.append(...children);
  return made;
}

function inline(text) {
  const nodes = [];
  for (let match; (match = INLINE.exec(text)); text = text.slice(match.index + match[0].length)) {
    if (match.index) nodes.push(text.slice(0, match.index));
    if (match[2] !== undefined) nodes.push(element("code", match[2].trim()));
    else if (match[3] !== undefined) nodes.push(element("strong", ...inline(match[3])));
    else if (match[4] !== undefined) nodes.push(element("em", ...inline(match[4])));
    else {
      const link = element("a", match[5]);
      link.href = match[6];
      link.rel = "noreferrer noopener";
      link.target = "_blank";
      nodes.push(link);
    }
  }
  if (text) nodes.push(text);
  return nodes;
}

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());

export function render(text) {
  const lines = text.split("\n"), nodes = [];
  let at = 0, paragraph = [];
  const close = () => {
    if (paragraph.length) nodes.push(element("p", ...inline(paragraph.join("\n"))));
    paragraph = [];
  };
  while (at < lines.length) {
    const line = lines[at];
    const fence = /^\s*(```+|~~~+)(.*)$/.exec(line), heading = /^(#{1,6})\s+(.*)$/.exec(line);
    const item = /^\s*([-*+]|\d{1,9}[.)])\s+(.*)$/.exec(line);
    if (fence) {
      close();
      const code = [];
      for (at += 1; at < lines.length && !lines[at].trim().startsWith(fence[1]); at += 1) code.push(lines[at]);
      const block = element("pre", element("code", code.join("\n")));
      block.tabIndex = 0;
      nodes.push(block);
    } else if (heading) {
      close();
      nodes.push(element(`h${Math.min(6, heading[1].length + 2)}`, ...inline(heading[2])));
    } else if (item) {
      close();
      const isOrdered = /\d/.test(item[1]), list = element(isOrdered ? "ol" : "ul");
      if (isOrdered) list.start = parseInt(item[1], 10);
      for (let next = item; next; next = at + 1 < lines.length ? /^\s*([-*+]|\d{1,9}[.)])\s+(.*)$/.exec(lines[at + 1]) : null) {
        if (next !== item) at += 1;
        list.append(element("li", ...inline(next[2])));
      }
      nodes.push(list);
    } else if (line.includes("|") && /^\s*\|?[\s:|-]*-[\s:|-]*$/.test(lines[at + 1] ?? "") && lines[at + 1].includes("|")) {
      close();
      const table = element("table", element("tr", ...cells(line).map((cell) => element("th", ...inline(cell)))));
      for (at += 2; at < lines.length && lines[at].includes("|"); at += 1) {
        table.append(element("tr", ...cells(lines[at]).map((cell) => element("td", ...inline(cell)))));
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
