// openai-node. URL and EMBEDDINGS_URL as arguments.
import assert from "node:assert";
import OpenAI from "openai";

const [url, embeddingsUrl] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const ask = { model: "tiny", messages: [{ role: "user", content: "Hello" }], max_tokens: 12, temperature: 0 };
const text = async () => (await client.chat.completions.create(ask)).choices[0].message.content;

const checks = {
  async chat() {
    assert(await text());
  },
  async stream() {
    let seen = "";
    for await (const chunk of await client.chat.completions.create({ ...ask, stream: true })) {
      seen += chunk.choices[0].delta.content ?? "";
    }
    assert.equal(seen, await text());
  },
  async stream_helper() {
    const runner = client.chat.completions.stream({ ...ask, structured_outputs: { regex: "[a-z]{5}" } });
    assert.match((await runner.finalChatCompletion()).choices[0].message.content, /^[a-z]{5}$/);
  },
  async n() {
    const reply = await client.chat.completions.create({ ...ask, n: 2, temperature: 1 });
    assert.deepEqual(reply.choices.map((choice) => choice.index), [0, 1]);
  },
  async logprobs() {
    const reply = await client.chat.completions.create({ ...ask, logprobs: true, top_logprobs: 2 });
    assert(reply.choices[0].logprobs.content.every((entry) => entry.top_logprobs.length === 2));
  },
  async error() {
    const refused = client.chat.completions.create({ ...ask, top_p: 7 });
    await assert.rejects(refused, (error) => error instanceof OpenAI.BadRequestError && error.param === "top_p");
  },
  async embeddings() {
    const other = new OpenAI({ baseURL: `${embeddingsUrl}/v1`, apiKey: "none", maxRetries: 0 });
    assert.equal((await other.embeddings.create({ model: "tiny", input: ["one", "two"] })).data.length, 2);
  },
  async aborted() {
    const chunks = await client.chat.completions.create({ ...ask, max_tokens: 1500, stream: true });
    for await (const _ of chunks) break;
    assert(await text());
  },
};

for (const [name, check] of Object.entries(checks)) {
  await check();
  console.log("ok", name);
}
