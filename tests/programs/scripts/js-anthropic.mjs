import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ baseURL: process.env.URL, apiKey: "none" });
const runner = client.beta.messages.toolRunner({
  model: "scripted",
  max_tokens: 1000,
  stream: true,
  messages: [{ role: "user", content: "Add the numbers." }],
  tools: [
    {
      name: "add",
      description: "Add.",
      input_schema: { type: "object", properties: { a: { type: "number" }, b: { type: "number" } } },
      parse: (input) => input,
      run: ({ a, b }) => String(a + b),
    },
  ],
});
const last = await runner.runUntilDone();
console.log("messages:", last.content.map((block) => block.text ?? "").join(""));
