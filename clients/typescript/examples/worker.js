// Does the work of other programs: pays invoices, and greets. Ends on SIGTERM, after the task that it is at.
//
//     node worker.js URL
import { Failed, Latchwork } from "../latchwork.js";

/** @param {import("../latchwork.js").Task} task */
function pay(task) {
  const { amount } = task.input.input;
  if (amount <= 0) return { outcome: "rejection", message: "the amount is not positive", field: "amount" };
  // The bank gets task.key as its idempotency key, so a second attempt does not pay twice.
  return { output: { receipt: `js-${task.input.entity.id}` }, data: { amount } };
}

/** @param {import("../latchwork.js").Task} task */
function greet(task) {
  // For a step of a workflow, the input of the workflow is in "input".
  const name = task.input?.input ?? task.input;
  if (!name) throw new Failed("there is no name to greet", { retryable: false });
  return `Hello, ${name}!`;
}

const options = { leaseMs: 5000, concurrency: 2, name: "worker.js" };
const worker = new Latchwork(process.argv[2]).worker({ pay, greet }, options);
process.on("SIGTERM", () => worker.stop());
console.log("working");
await worker.run();
