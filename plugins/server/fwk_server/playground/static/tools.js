// Tools of the MCP servers that the operator names: which of them a chat may use, and the calls that wait for a person.

import { $, element, get } from "./api.js";
import { visible } from "./markdown.js";

export class ToolServers {
  constructor(changed) {
    Object.assign(this, { changed, servers: [], chosen: new Set() });
    $("tool-reads").onchange = changed;
  }

  // Nothing is shown where the server has none, or none of the API.
  async load() {
    this.servers = (await get("/v1/tool_servers").catch(() => null))?.data ?? [];
    $("tool-servers").hidden = !this.servers.length;
    $("tool-list").replaceChildren(...this.servers.map((server) => this.row(server)));
  }

  row({ label, tools }) {
    const box = element("input", { type: "checkbox", checked: this.chosen.has(label) });
    box.onchange = () => {
      if (box.checked) this.chosen.add(label);
      else this.chosen.delete(label);
      this.changed();
    };
    const told = tools.map((tool) => element("li", {}, element("code", { textContent: visible(tool.name) }),
      ` ${visible(tool.description)}${tool.annotations?.readOnlyHint ? " (only reads)" : ""}`));
    return element("li", {}, element("label", { className: "check" }, box, ` ${visible(label)}`),
      element("details", {}, element("summary", { textContent: `${tools.length} tools` }), element("ul", {}, ...told)));
  }

  // What the request says of the servers that are ticked.
  entries() {
    const require_approval = $("tool-reads").checked ? { never: { read_only: true } } : "always";
    return this.servers.filter((server) => this.chosen.has(server.label))
      .map((server) => ({ type: "mcp", server_label: server.label, require_approval }));
  }
}

const call = (item) => element("code", { textContent: `${visible(item.server_label)}: ${visible(item.name)}(${visible(item.arguments)})` });

const failure = ({ message, content }) => message ?? (content ?? []).map((block) => block.text ?? "").join("\n");

// The calls that were made, each with its result folded.
export function made(node) {
  return (node.items ?? []).filter((item) => item.type === "mcp_call").map((item) => element("details", { className: "call" },
    element("summary", {}, call(item), item.error ? " failed" : ""),
    element("pre", { tabIndex: 0, ariaLabel: `Result of ${visible(item.name)}`, textContent: visible(item.error ? failure(item.error) : (item.output ?? "")) })));
}

export const waiting = (node) => (node.items ?? []).filter((item) => item.type === "mcp_approval_request" && node.answers?.[item.id] === undefined);

// The calls that wait: answer(item, approve) is called with what the person says.
export function asked(node, answer) {
  return waiting(node).map((item) => {
    const button = (text, approve) => element("button", { type: "button", textContent: text, ariaLabel: `${text}: ${visible(item.name)}`, onclick: () => answer(item, approve) });
    return element("div", { className: "approval", role: "group", ariaLabel: `May ${visible(item.name)} be run?` },
      element("p", {}, "The model asks to run ", call(item)), button("Run", true), button("Do not run", false));
  });
}
