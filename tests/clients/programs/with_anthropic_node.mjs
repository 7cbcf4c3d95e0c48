// @anthropic-ai/sdk, against a server of no flags. URL and the model's name as arguments.
import Anthropic from "@anthropic-ai/sdk";
import assert from "node:assert/strict";

const [baseURL, model] = process.argv.slice(2);
const client = new Anthropic({ baseURL, apiKey: "none", maxRetries: 0 });
const base = {
  model,
  max_tokens: 100,
  temperature: 0,
  messages: [{ role: "user", content: "How is the weather in Paris?" }],
};
const city = { type: "object", properties: { city: { type: "string", maxLength: 20 } }, required: ["city"] };
const tools = [{ name: "weather", description: "The weather of a city.", input_schema: city }];

const checks = {
  async chat() {
    const reply = await client.messages.create(base);
    assert(reply.content[0].text);
    assert(reply.usage.output_tokens <= 100);
  },
  async stream() {
    const whole = (await client.messages.create(base)).content[0].text;
    let text = "";
    await client.messages
      .stream(base)
      .on("text", (part) => (text += part))
      .finalMessage();
    assert.equal(text, whole);
  },
  async tool() {
    const reply = await client.messages.create({ ...base, tools, tool_choice: { type: "tool", name: "weather" } });
    assert.equal(reply.stop_reason, "tool_use");
    assert.equal(typeof reply.content.at(-1).input.city, "string");
  },
  async structured() {
    const reply = await client.messages.stream({ ...base, tools, tool_choice: { type: "any" } }).finalMessage();
    assert.equal(typeof reply.content.at(-1).input.city, "string");
  },
  async error() {
    await assert.rejects(client.messages.create({ ...base, temperature: -7 }), (failure) => {
      assert(failure instanceof Anthropic.BadRequestError, String(failure));
      assert.match(failure.message, /temperature/);
      return true;
    });
  },
};

for (const [check, run] of Object.entries(checks)) {
  await run();
  console.log("ok", check);
}
