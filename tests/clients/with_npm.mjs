// What users of the official JavaScript client do: `node with_npm.mjs BASE_URL KEY MODEL`, beside a node_modules.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

// The package stands where the command runs, not beside this file.
const here = createRequire(pathToFileURL(process.cwd() + "/"));
const OpenAI = here("openai");
const [baseURL, apiKey, model] = process.argv.slice(2);
const messages = [{ role: "user", content: "How is the weather in Paris?" }];
const schema = (properties) => ({
  type: "object", properties, required: Object.keys(properties), additionalProperties: false,
});
const parameters = schema({ city: { enum: ["Paris", "Rome"] } });
const tools = [{ type: "function", function: { name: "weather", parameters } }];
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const create = (change) => client.chat.completions.create({ model, messages, max_tokens: 12, temperature: 0, ...change });

const parts = {
  async chat() {
    const whole = await create();
    assert.equal(whole.usage.total_tokens, whole.usage.prompt_tokens + whole.usage.completion_tokens);
    let said = "", used;
    for await (const chunk of await create({ stream: true, stream_options: { include_usage: true } })) {
      said += chunk.choices[0]?.delta.content ?? "";
      used = chunk.usage ?? used;
    }
    assert.equal(said, whole.choices[0].message.content);
    assert.equal(used.total_tokens, whole.usage.total_tokens);
  },
  async tools() {
    const asked = { tools, tool_choice: "required", parallel_tool_calls: false, max_tokens: 150 };
    const { message } = (await create(asked)).choices[0];
    const [call] = message.tool_calls;
    assert.ok(["Paris", "Rome"].includes(JSON.parse(call.function.arguments).city));
    const result = { role: "tool", tool_call_id: call.id, content: "rain" };
    await create({ messages: [...messages, message, result], tools, max_tokens: 4 });
    const stream = client.chat.completions.stream({ model, messages, temperature: 0, ...asked });
    const last = (await stream.finalChatCompletion()).choices[0];
    assert.equal(last.message.tool_calls[0].function.arguments, call.function.arguments);
  },
  async structured() {
    const format = { name: "weather", strict: true, schema: schema({ city: { enum: ["Paris", "Rome"] }, sunny: { type: "boolean" } }) };
    const whole = await create({ response_format: { type: "json_schema", json_schema: format }, max_tokens: 150 });
    assert.equal(typeof JSON.parse(whole.choices[0].message.content).sunny, "boolean");
    const answer = await client.responses.create({ model, input: "weather", text: { format: { type: "json_schema", ...format } },
      max_output_tokens: 150 });
    assert.equal(typeof JSON.parse(answer.output_text).sunny, "boolean");
  },
  async others() {
    assert.ok((await client.models.list()).data.some((m) => m.id === model));
    assert.equal((await client.embeddings.create({ model, input: ["a", "b"] })).data.length, 2);
    const kinds = [];
    for await (const event of await client.responses.create({ model, input: "a", max_output_tokens: 4, stream: true })) {
      kinds.push(event.type);
    }
    assert.equal(kinds[0], "response.created");
    assert.ok(["response.completed", "response.incomplete"].includes(kinds.at(-1)));
  },
  async errors() {
    const wrong = new OpenAI({ baseURL, apiKey: "wrong", maxRetries: 0 });
    await assert.rejects(wrong.chat.completions.create({ model, messages }), OpenAI.AuthenticationError);
    await assert.rejects(create({ model: "nothing" }), OpenAI.NotFoundError);
    await assert.rejects(create({ temperature: 3 }), (e) => e instanceof OpenAI.BadRequestError && e.param === "temperature");
  },
};

for (const [name, part] of Object.entries(parts)) {
  await part();
  console.log("ok", name);
}
console.log("openai (npm)", JSON.parse(readFileSync("node_modules/openai/package.json")).version, "node", process.version);
