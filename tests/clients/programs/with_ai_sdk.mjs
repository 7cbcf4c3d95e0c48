// ai and @ai-sdk/openai with its default provider (Responses), against a server of no flags. URL and the model's name.
import { createOpenAI } from "@ai-sdk/openai";
import { APICallError, Output, generateText, jsonSchema, streamText, tool } from "ai";
import assert from "node:assert/strict";

const [url, name] = process.argv.slice(2);
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const base = { model: openai(name), maxRetries: 0, temperature: 0, maxOutputTokens: 100 };
const city = { type: "object", properties: { city: { type: "string", maxLength: 20 } }, required: ["city"] };
const colour = {
  type: "object",
  properties: { colour: { enum: ["red", "green"] } },
  required: ["colour"],
  additionalProperties: false,
};

const checks = {
  async chat() {
    const { text, usage } = await generateText({ ...base, prompt: "Hello" });
    assert(text);
    assert(usage.outputTokens <= 100);
  },
  async stream() {
    const whole = (await generateText({ ...base, prompt: "Hello" })).text;
    let text = "";
    for await (const part of streamText({ ...base, prompt: "Hello" }).textStream) text += part;
    assert.equal(text, whole);
  },
  async tool() {
    const weather = tool({
      description: "The weather of a city.",
      inputSchema: jsonSchema(city),
      execute: async (given) => `Sunny in ${given.city}.`,
    });
    const { toolCalls, toolResults } = await generateText({
      ...base,
      prompt: "How is the weather in Paris?",
      tools: { weather },
      toolChoice: "required",
    });
    assert.equal(toolCalls[0].toolName, "weather");
    assert.match(toolResults[0].output, /^Sunny in /);
  },
  async structured() {
    const { output } = await generateText({
      ...base,
      prompt: "Which colour has grass?",
      output: Output.object({ schema: jsonSchema(colour) }),
    });
    assert(["red", "green"].includes(output.colour));
  },
  async error() {
    await assert.rejects(generateText({ ...base, topP: 7, prompt: "Hello" }), (failure) => {
      assert(APICallError.isInstance(failure), String(failure));
      assert.equal(failure.statusCode, 400);
      assert.match(failure.message, /top_p/);
      return true;
    });
  },
};

for (const [check, run] of Object.entries(checks)) {
  await run();
  console.log("ok", check);
}
