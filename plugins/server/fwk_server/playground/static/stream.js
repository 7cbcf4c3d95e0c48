// One answer: the request of /v1/chat/completions, and what the events of a stream add to a message.

import { headers, problem } from "./api.js";

const content = (node) => (node.images?.length
  ? [{ type: "text", text: node.content }, ...node.images.map((url) => ({ type: "image_url", image_url: { url } }))]
  : node.content);

export function messages(nodes, system) {
  const made = system ? [{ role: "system", content: system }] : [];
  for (const node of nodes) {
    const message = { role: node.role, content: content(node) };
    if (node.calls?.length) message.tool_calls = node.calls;
    if (node.role === "tool") message.tool_call_id = node.call;
    made.push(message);
  }
  return made;
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

export function takeChunk(node, event) {
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

function stats(node, start, first, end) {
  const count = node.usage?.completion_tokens, parts = [];
  if (first) parts.push(`first token ${((first - start) / 1000).toFixed(2)} s`);
  if (count > 1 && end > first) parts.push(`${(((count - 1) * 1000) / (end - first)).toFixed(1)} tokens/s`);
  if (node.usage) {
    const cached = node.usage.prompt_tokens_details?.cached_tokens ?? 0;
    parts.push(`${node.usage.prompt_tokens} tokens in (${cached} from the cache), ${count} out`);
  }
  if (node.reason && node.reason !== "stop") parts.push(`ended: ${node.reason}`);
  return parts.join(", ");
}

// Streams an answer into node. make() returns the route, the body, and what takes an event into the node; grown() is
// called with each event. What goes wrong is told in the node.
export async function stream(node, make, signal, grown) {
  const start = performance.now();
  let first = 0;
  try {
    const { url, body, take } = make();
    const reply = await fetch(url, { method: "POST", headers: headers(), body: JSON.stringify({ ...body, stream: true }), signal });
    if (!reply.ok) throw new Error(await problem(reply));
    for await (const event of events(reply)) {
      first ||= event.choices?.length || event.delta ? performance.now() : 0;
      take(node, event);
      grown();
    }
  } catch (error) {
    if (error.name === "AbortError") node.reason = "stopped";
    else node.error = error.message;
  }
  node.stats = stats(node, start, first, performance.now());
}
