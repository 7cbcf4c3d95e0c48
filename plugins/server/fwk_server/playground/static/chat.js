// A chat is a tree: an edit or another try is a sibling, and each node knows which of its children is shown.

const KEPT = ["role", "content", "thinking", "calls", "tokens", "reason", "error", "stats", "call", "name", "images", "items", "answers", "shown"];

export class Chat {
  constructor(kept = {}) {
    this.id = kept.id ?? newId();
    this.changed = kept.changed ?? Date.now();
    this.root = { children: [], shown: 0 };
    // A list, as a call for each message would be too deep for a long chat.
    const nodes = [this.root];
    for (const { parent, ...node } of kept.nodes ?? []) nodes.push(attach(nodes[parent], node));
    nodes.forEach((node, i) => { node.shown = i ? node.shown : (kept.shown ?? 0); });
    for (const node of nodes) if (!node.children[node.shown]) node.shown = 0;
  }

  get title() {
    const text = this.root.children[0]?.content ?? "";
    return text.slice(0, 200).split("\n").find((line) => line.trim())?.slice(0, 80) || (text || this.root.children[0] ? "Images" : "New chat");
  }

  // The messages that are shown.
  path() {
    const nodes = [];
    for (let node = this.root; node.children.length; ) {
      node = node.children[node.shown];
      nodes.push(node);
    }
    return nodes;
  }

  add(parent, node) {
    const made = attach(parent, { shown: 0, ...node });
    parent.shown = parent.children.length - 1;
    return made;
  }

  // As it is stored: a list in which each message names the place of the one before it.
  kept() {
    const places = new Map([[this.root, 0]]), nodes = [];
    for (const node of this.everything()) {
      places.set(node, places.size);
      const one = { parent: places.get(node.parent) };
      for (const name of KEPT) if (node[name] !== undefined) one[name] = node[name];
      nodes.push(one);
    }
    return { id: this.id, changed: this.changed, shown: this.root.shown, nodes };
  }

  // All messages, each after its parent.
  everything() {
    const found = [...this.root.children];
    for (let i = 0; i < found.length; i += 1) found.push(...found[i].children);
    return found;
  }

  contains(words) {
    const text = this.everything().map((node) => node.content).join("\n").toLowerCase();
    return words.every((word) => text.includes(word));
  }

  // The messages that are shown, as Markdown.
  markdown() {
    const names = { user: "You", assistant: "Model", tool: "Result of a tool" };
    return `# ${this.title}\n\n${this.path().map((node) => `## ${names[node.role]}\n\n${node.content}\n`).join("\n")}`;
  }
}

function attach(parent, node) {
  const made = { ...node, children: [], parent };
  parent.children.push(made);
  return made;
}

// randomUUID is not there on a page that came without TLS from another machine.
function newId() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((one) => one.toString(16).padStart(2, "0")).join("");
}
