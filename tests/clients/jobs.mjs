// A small job with each client of Node: an answer, a stream, a tool and a schema. Arguments: the server, names of clients.
// The exit status is the number of jobs that failed.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const [url, ...names] = process.argv.slice(2);
const require = createRequire(join(process.cwd(), "package.json"));
const load = (name) => import(pathToFileURL(require.resolve(name)).href);
const ASK = [{ role: "user", content: "Mara is a baker. What is Mara?" }];
const RAIN = [{ role: "user", content: "What is the weather in Rome?" }];
const PARAMETERS = { type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false };
const FUNCTION = { name: "weather", description: "the weather of a city", parameters: PARAMETERS };
const PERSON = {
  type: "object",
  properties: { name: { type: "string" }, job: { type: "string" } },
  required: ["name", "job"],
  additionalProperties: false,
};

async function openaiClient() {
  const { default: OpenAI } = await load("openai");
  return new OpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
}

async function openaiChat() {
  const chat = (await openaiClient()).chat.completions;
  const given = { model: "sprout", temperature: 0, max_tokens: 80 };
  const text = (await chat.create({ messages: ASK, ...given })).choices[0].message.content;
  assert.match(text, /baker/);
  let streamed = "";
  for await (const chunk of await chat.create({ messages: ASK, stream: true, ...given }))
    streamed += chunk.choices[0]?.delta?.content ?? "";
  assert.equal(streamed, text);
  const tools = [{ type: "function", function: FUNCTION }];
  const called = await chat.create({ messages: RAIN, tools, tool_choice: "required", ...given });
  assert.ok("city" in JSON.parse(called.choices[0].message.tool_calls[0].function.arguments));
  const response_format = { type: "json_schema", json_schema: { name: "person", strict: true, schema: PERSON } };
  const parsed = await chat.parse({ messages: ASK, response_format, ...given });
  assert.ok(JSON.parse(parsed.choices[0].message.content).name);
  const runner = chat.runTools({
    messages: RAIN,
    tools: [{ type: "function", function: { ...FUNCTION, parse: JSON.parse, function: () => "sun" } }],
    ...given,
  });
  assert.equal(typeof (await runner.finalContent()), "string");
}

async function openaiResponses() {
  const responses = (await openaiClient()).responses;
  const given = { model: "sprout", temperature: 0, max_output_tokens: 80 };
  const first = await responses.create({ input: ASK, ...given });
  assert.match(first.output_text, /baker/);
  assert.ok((await responses.create({ input: "And?", previous_response_id: first.id, ...given })).output_text);
  const types = [];
  for await (const event of responses.stream({ input: ASK, ...given })) types.push(event.type);
  assert.equal(types.at(-1), "response.completed");
  const tools = [{ type: "function", strict: true, ...FUNCTION }];
  const called = await responses.create({ input: RAIN, tools, tool_choice: "required", ...given });
  assert.ok("city" in JSON.parse(called.output[0].arguments));
  const text = { format: { type: "json_schema", name: "person", strict: true, schema: PERSON } };
  assert.ok(JSON.parse((await responses.parse({ input: ASK, text, ...given })).output_text).name);
}

async function vercel(model) {
  const { generateText, streamText, tool, jsonSchema, Output } = await load("ai");
  const given = { model, temperature: 0, maxOutputTokens: 80, maxRetries: 0 };
  const { text } = await generateText({ messages: ASK, ...given });
  assert.match(text, /baker/);
  let streamed = "";
  for await (const piece of streamText({ messages: ASK, ...given }).textStream) streamed += piece;
  assert.equal(streamed, text);
  const weather = tool({ description: "the weather of a city", inputSchema: jsonSchema(PARAMETERS), execute: () => "sun" });
  const called = await generateText({ messages: RAIN, tools: { weather }, toolChoice: "required", ...given });
  assert.ok("city" in called.toolCalls[0].input);
  assert.equal(called.toolResults[0].output, "sun");
  const output = Output.object({ schema: jsonSchema(PERSON) });
  assert.ok((await generateText({ messages: ASK, output, ...given })).output.name);
}

async function vercelChat() {
  const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
  await vercel(createOpenAICompatible({ name: "graftlm", baseURL: `${url}/v1`, supportsStructuredOutputs: true })("sprout"));
}

async function vercelResponses() {
  const { createOpenAI } = await load("@ai-sdk/openai");
  await vercel(createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" })("sprout"));
}

async function langchainChat() {
  const { ChatOpenAI } = await load("@langchain/openai");
  const configuration = { baseURL: `${url}/v1` };
  const model = new ChatOpenAI({ model: "sprout", apiKey: "none", temperature: 0, maxTokens: 80, maxRetries: 0, configuration });
  const text = (await model.invoke(ASK)).content;
  assert.match(text, /baker/);
  let streamed = "";
  for await (const chunk of await model.stream(ASK)) streamed += chunk.content;
  assert.equal(streamed, text);
  const tools = [{ type: "function", function: FUNCTION }];
  assert.ok("city" in (await model.bindTools(tools, { tool_choice: "required" }).invoke(RAIN)).tool_calls[0].args);
  assert.ok((await model.withStructuredOutput(PERSON, { name: "person", method: "jsonSchema" }).invoke(ASK)).name);
}

const JOBS = {
  openai: [openaiChat, openaiResponses],
  ai: [vercelChat, vercelResponses],
  "@langchain/openai": [langchainChat],
};

let failed = 0;
for (const name of names.length ? names : Object.keys(JOBS)) {
  for (const job of JOBS[name]) {
    const started = performance.now();
    let how = "passed";
    try {
      await job();
    } catch (error) {
      [how, failed] = ["FAILED", failed + 1];
      console.error(error);
    }
    console.log(`${name} (node): ${job.name} ${how} in ${((performance.now() - started) / 1000).toFixed(1)} s`);
  }
}
process.exit(failed);
