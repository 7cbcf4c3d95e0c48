// One answer from /v1/responses, which has the tools of MCP servers called: the request, and what its events add.

const image = (url) => ({ type: "input_image", image_url: url });

function message(role, text, images = []) {
  const kind = role === "assistant" ? "output_text" : "input_text";
  return { type: "message", role, content: [{ type: kind, text }, ...images.map(image)] };
}

// What an answer is in the next request: its items, the text that was cut off, and what the person approved.
function said(node) {
  const items = [...(node.items ?? [])];
  const whole = items.filter((item) => item.type === "message").map((item) => item.content.map((part) => part.text).join("")).join("");
  const rest = node.content.slice(whole.length);
  if (rest) items.push(message("assistant", rest));
  if (!node.items) {
    for (const call of (node.calls ?? []).filter(Boolean)) {
      items.push({ type: "function_call", call_id: call.id, name: call.function.name, arguments: call.function.arguments });
    }
  }
  for (const [id, approve] of Object.entries(node.answers ?? {})) {
    items.push({ type: "mcp_approval_response", approval_request_id: id, approve });
  }
  return items;
}

export function input(nodes) {
  return nodes.flatMap((node) => {
    if (node.role === "tool") return [{ type: "function_call_output", call_id: node.call, output: node.content }];
    return node.role === "assistant" ? said(node) : [message("user", node.content, node.images)];
  });
}

// The same request as to /v1/chat/completions, with tool servers.
export function fromChat({ messages, max_tokens, logprobs, top_logprobs, response_format, tools, ...same }, nodes, system, servers) {
  const body = { ...same, input: input(nodes), store: false, tools: [...servers, ...(tools ?? []).map((tool) => ({ type: "function", ...tool.function }))] };
  if (system) body.instructions = system;
  if (max_tokens !== undefined) body.max_output_tokens = max_tokens;
  if (logprobs) body.top_logprobs = top_logprobs;
  if (response_format) body.text = { format: { type: "json_schema", ...response_format.json_schema } };
  return body;
}

export function takeItem(node, event) {
  if (event.type === "error" || event.type === "response.failed" || event.error) {
    throw new Error(event.response?.error?.message ?? event.message ?? event.error?.message ?? "the response failed");
  }
  if (event.type === "response.output_text.delta") {
    node.content += event.delta;
    node.tokens.push(...(event.logprobs ?? []));
  } else if (event.type === "response.reasoning_text.delta") node.thinking += event.delta;
  else if (event.type === "response.output_item.done") {
    const { item } = event;
    (node.items ??= []).push(item);
    if (item.type === "function_call") node.calls.push({ id: item.call_id, type: "function", function: { name: item.name, arguments: item.arguments } });
  } else if (event.type === "response.completed" || event.type === "response.incomplete") {
    const { usage, status } = event.response;
    node.reason = status === "completed" ? "stop" : "length";
    node.usage = { prompt_tokens: usage.input_tokens, completion_tokens: usage.output_tokens, prompt_tokens_details: usage.input_tokens_details };
  }
}
