import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.env.URL}/v1`, apiKey: "none" });
const model = "scripted";
const messages = [{ role: "user", content: "Add the numbers." }];
const parameters = { type: "object", properties: { a: { type: "number" }, b: { type: "number" } } };
const add = ({ a, b }) => String(a + b);

const tool = { name: "add", description: "Add.", parameters, parse: JSON.parse, function: add };
const runner = client.chat.completions.runTools({
  model,
  messages,
  stream: true,
  tools: [{ type: "function", function: tool }],
});
console.log("chat:", await runner.finalContent());

let input = [...messages];
for (;;) {
  const stream = client.responses.stream({
    model,
    input,
    tools: [{ type: "function", name: "add", description: "Add.", parameters, strict: false }],
  });
  const response = await stream.finalResponse();
  const calls = response.output.filter((item) => item.type === "function_call");
  if (calls.length === 0) {
    console.log("responses:", response.output_text);
    break;
  }
  input = [...input, ...response.output];
  for (const call of calls) {
    const output = add(JSON.parse(call.arguments));
    input.push({ type: "function_call_output", call_id: call.call_id, output });
  }
}
