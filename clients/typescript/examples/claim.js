// Pays an invoice once, however many programs try.
//
//     node claim.js URL INVOICE AMOUNT
import { Latchwork, Problem } from "../latchwork.js";

const [url, invoice, amount] = process.argv.slice(2);
try {
  const input = { amount: Number(amount) };
  const paid = await new Latchwork(url).fire("invoice", "pay", invoice, { input, requester: "admin" });
  console.log(`paid: ${paid.from} -> ${paid.to}, receipt ${paid.output.receipt}`);
} catch (error) {
  if (!(error instanceof Problem && ["claimed", "not-permitted"].includes(error.code))) throw error;
  console.log(`not paid here: ${error.code}`);
}
