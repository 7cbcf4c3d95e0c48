// ai and one of its providers, against a server of no flags. The provider's package, URL and the model's name.
import { APICallError, Output, generateText, jsonSchema, streamText, tool } from "ai";
import assert from "node:assert/strict";

const [pkg, url, name] = process.argv.slice(2);
const provider = await import(pkg);
const given = { baseURL: `${url}/v1`, apiKey: "none" };
const made = {
  "@ai-sdk/openai": () => provider.createOpenAI(given), // Responses
  "@ai-sdk/openai-compatible": () => provider.createOpenAICompatible({ ...given, name: "fwk", supportsStructuredOutputs: true }),
  "@ai-sdk/anthropic": () => provider.createAnthropic(given),
}[pkg]();
const base = { model: made(name), maxRetries: 0, temperature: 0, maxOutputTokens: 100 };
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
    await assert.rejects(generateText({ ...base, model: made("other"), prompt: "Hello" }), (failure) => {
      assert(APICallError.isInstance(failure), String(failure));
      assert.equal(failure.statusCode, 404);
      assert.match(failure.message, /not served here/);
      return true;
    });
  },
};

for (const [check, run] of Object.entries(checks)) {
  await run();
  console.log("ok", check);
}
