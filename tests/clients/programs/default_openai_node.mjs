// openai for Node, against a server of no flags. URL and the model's name as arguments.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "How is the weather in Paris?" }];
const base = { model, messages, max_tokens: 100, temperature: 0 };
const parameters = { type: "object", properties: { city: { type: "string", maxLength: 20 } }, required: ["city"] };
const weather = { name: "weather", description: "The weather of a city.", parameters };
const schema = { type: "object", properties: { colour: { enum: ["red", "green"] } }, required: ["colour"] };

const checks = {
  async chat() {
    assert((await client.chat.completions.create(base)).choices[0].message.content);
  },
  async stream() {
    const whole = (await client.chat.completions.create(base)).choices[0].message.content;
    assert.equal(await client.chat.completions.stream(base).finalContent(), whole);
  },
  async tool() {
    const tools = [{ type: "function", function: weather }];
    const reply = await client.chat.completions.create({ ...base, tools, tool_choice: "required" });
    assert.equal(typeof JSON.parse(reply.choices[0].message.tool_calls[0].function.arguments).city, "string");
  },
  async structured() {
    const response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
    const reply = await client.chat.completions.create({ ...base, response_format });
    assert(["red", "green"].includes(JSON.parse(reply.choices[0].message.content).colour));
  },
  async responses() {
    const asked = { model, input: "Hello", max_output_tokens: 50, temperature: 0 };
    const reply = await client.responses.create(asked);
    assert(reply.output_text);
    assert.equal((await client.responses.stream(asked).finalResponse()).output_text, reply.output_text);
  },
  async error() {
    await assert.rejects(client.chat.completions.create({ ...base, top_p: 7 }), (failure) => {
      assert(failure instanceof OpenAI.BadRequestError, String(failure));
      assert.equal(failure.param, "top_p");
      return true;
    });
  },
};

for (const [check, run] of Object.entries(checks)) {
  await run();
  console.log("ok", check);
}
