// OpenAI's agents: a tool loop with a typed answer, over Responses and over chat.
import { Agent, run, setDefaultOpenAIClient, setOpenAIAPI, setTracingDisabled, tool } from "@openai/agents";
import OpenAI from "openai";
import { z } from "zod";

setTracingDisabled(true);
setDefaultOpenAIClient(new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 }));
const City = z.object({ city: z.enum(["Paris", "Rome"]) });
const zone = z.object({ zone: z.enum(["UTC", "CET"]) });
const clock = tool({ name: "clock", description: "The time.", parameters: zone, execute: async () => "noon" });

for (const api of ["responses", "chat_completions"]) {
  setOpenAIAPI(api);
  const agent = new Agent({ name: "a", model: "tiny", tools: [clock], outputType: City, modelSettings: { maxTokens: 100 } });
  const result = await run(agent, "Where is it noon?", { maxTurns: 4 });
  const calls = result.newItems.filter((item) => item.type === "tool_call_item").length;
  console.log(JSON.stringify({ name: api, calls, output: City.parse(result.finalOutput) }));
}
