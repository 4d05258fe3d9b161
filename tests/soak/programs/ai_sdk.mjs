// The `ai` package: text, a stream, an object and a tool loop with a typed answer, over every API that it speaks.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const url = `${process.argv[2]}/v1`;
const apiKey = "none";
const openai = createOpenAI({ baseURL: url, apiKey });
const models = {
  responses: openai("tiny"),
  chat: openai.chat("tiny"),
  messages: createAnthropic({ baseURL: url, apiKey })("tiny"),
  compatible: createOpenAICompatible({ name: "penstock", baseURL: url, supportsStructuredOutputs: true })("tiny"),
};
const City = z.object({ city: z.enum(["Paris", "Rome"]) });
const zone = z.object({ zone: z.enum(["UTC", "CET"]) });
const clock = tool({ description: "The time.", inputSchema: zone, execute: async () => "noon" });

for (const [name, model] of Object.entries(models)) {
  const asked = { model, prompt: "Where is it noon?", maxOutputTokens: 100, maxRetries: 0 };
  await generateText(asked);
  let parts = 0;
  for await (const _ of streamText({ ...asked, onError: ({ error }) => { throw error; } }).textStream) parts++;
  const { object } = await generateObject({ ...asked, schema: City });
  const output = Output.object({ schema: City });
  const loop = await generateText({ ...asked, tools: { clock }, output, stopWhen: stepCountIs(4) });
  const calls = loop.steps.flatMap((step) => step.toolCalls).length;
  console.log(JSON.stringify({ name, streamed: parts > 1, object: City.parse(object), calls, output: City.parse(loop.output) }));
}
