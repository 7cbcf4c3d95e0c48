// The panel "Chats": what was said before, to search, open, export and delete.

import { $, download, element } from "./api.js";
import { Chat } from "./chat.js";
import { visible } from "./markdown.js";
import * as store from "./store.js";

const MAX_LISTED = 200;

export class History {
  // current: which chat is open; open(chat): opens one; tell(text): says what went wrong.
  constructor(current, open, tell) {
    Object.assign(this, { current, open, tell, chats: new Map() });
    $("search").oninput = () => this.draw();
    $("export-all").onclick = () => this.exportAll();
    $("delete-all").onclick = () => twice($("delete-all"), "Delete all chats", () => this.deleteAll());
  }

  async load() {
    try {
      this.chats = new Map((await store.all("chats")).map((kept) => [kept.id, new Chat(kept)]));
    } catch (error) {
      this.tell(`Chats are not kept: ${error.message}`);
    }
    this.draw();
  }

  async keep(chat) {
    if (!chat.root.children.length) return;
    chat.changed = Date.now();
    this.chats.set(chat.id, chat);
    this.draw();
    try {
      await store.put("chats", chat.kept());
    } catch (error) {
      this.tell(`This chat is not kept: ${error.message}`);
    }
  }

  async delete(chat) {
    this.chats.delete(chat.id);
    await store.remove("chats", chat.id).catch((error) => this.tell(error.message));
    if (this.current() === chat) this.open(new Chat());
    this.draw();
  }

  async deleteAll() {
    this.chats.clear();
    await store.clear("chats").catch((error) => this.tell(error.message));
    this.open(new Chat());
    this.draw();
  }

  exportAll() {
    const chats = this.newestFirst().map((chat) => chat.kept());
    download("fwk-chats.json", "application/json", JSON.stringify({ version: 1, chats }, null, 1));
  }

  newestFirst() {
    return [...this.chats.values()].sort((one, other) => other.changed - one.changed);
  }

  draw() {
    const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = this.newestFirst().filter((chat) => chat.contains(words));
    $("chat-list").replaceChildren(...found.slice(0, MAX_LISTED).map((chat) => this.row(chat)));
    const left = found.length - MAX_LISTED;
    $("chat-count").textContent = !this.chats.size ? "Chats are kept in this browser." : left > 0 ? `${left} more: search for them` : found.length ? "" : "No chat has these words.";
  }

  row(chat) {
    const title = visible(chat.title);
    const open = element("button", { type: "button", className: "title", textContent: title, onclick: () => this.open(chat) });
    if (chat === this.current()) open.ariaCurrent = "true";
    const give = element("button", { type: "button", textContent: "Export", ariaLabel: `Export ${title}` });
    give.onclick = () => download("fwk-chat.md", "text/markdown", chat.markdown());
    const away = element("button", { type: "button", textContent: "Delete", ariaLabel: `Delete ${title}` });
    away.onclick = () => twice(away, "Delete", () => this.delete(chat));
    return element("li", {}, open, give, away);
  }
}

// What cannot be undone is asked for twice.
function twice(button, name, action) {
  if (button.dataset.isAsked) {
    delete button.dataset.isAsked;
    button.textContent = name;
    action();
    return;
  }
  button.dataset.isAsked = "yes";
  button.textContent = "Really?";
  setTimeout(() => {
    delete button.dataset.isAsked;
    button.textContent = name;
  }, 4000);
}
