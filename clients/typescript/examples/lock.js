// Holds a lock while it works. Run it twice at the same time: the second one waits.
//
//     node lock.js URL NAME
import { Latchwork } from "../latchwork.js";

const [url, name] = process.argv.slice(2);
await new Latchwork(url).lock(name, { waitMs: 60_000, leaseMs: 5000 }, async (held) => {
  console.log(`token ${held.token}: begin`);
  for (let part = 0; part < 4; part += 1) {
    held.check(); // before each part of the work
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
  console.log(`token ${held.token}: end`);
});
