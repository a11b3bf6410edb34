import { createAnthropic } from "@ai-sdk/anthropic";
import { createDeepSeek } from "@ai-sdk/deepseek";
import { createMistral } from "@ai-sdk/mistral";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { stepCountIs, streamText, tool } from "ai";
import { createOllama } from "ollama-ai-provider-v2";
import { z } from "zod";

const baseURL = `${process.env.URL}/v1`;
const apiKey = "none";
const models = {
  "openai responses": createOpenAI({ baseURL, apiKey }).responses("scripted"),
  "openai chat": createOpenAI({ baseURL, apiKey }).chat("scripted"),
  "openai-compatible": createOpenAICompatible({ name: "local", baseURL, apiKey })("scripted"),
  anthropic: createAnthropic({ baseURL, apiKey })("scripted"),
  mistral: createMistral({ baseURL, apiKey })("scripted"),
  deepseek: createDeepSeek({ baseURL, apiKey })("scripted"),
  ollama: createOllama({ baseURL: `${process.env.URL}/api` })("scripted"),
};
for (const [name, model] of Object.entries(models)) {
  const result = streamText({
    model,
    prompt: "Add the numbers.",
    stopWhen: stepCountIs(5),
    onError: ({ error }) => console.log(`${name}: ${error}`),
    tools: {
      add: tool({
        description: "Add.",
        inputSchema: z.object({ a: z.number(), b: z.number() }),
        execute: ({ a, b }) => a + b,
      }),
    },
  });
  console.log(`${name}:`, await result.text);
}
