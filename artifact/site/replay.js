// One head's pages under one policy at one budget, step by step: the rule of wakekv/simulation/residency.py under a cold start.
// A test compares every cell with what wakekv's own replay does.
"use strict";

const WakeKV = (globalThis.WakeKV = globalThis.WakeKV || {});

// What a page is to its head at one step: wakekv/drawing/mechanism.py's states, in its order.
WakeKV.STATES = [
  "not seen yet", "resident", "read", "first read", "in reservoir", "missed, fetched", "destroyed", "missed, gone",
];
const [UNSEEN, RESIDENT, READ, FIRST, RESERVOIR, FETCHED, DESTROYED, LOST] = WakeKV.STATES.keys();

// rank: what stays longest. every: steps between trims, 0 never. fetch: back at a miss, or only at a trim.
WakeKV.POLICIES = {
  reactive: { rank: "recency", reversible: true, every: 1, fetch: "miss", about: "keeps what was read last; the rest waits in the reservoir" },
  evict: { rank: "recency", reversible: false, every: 1, fetch: "miss", about: "keeps what was read last, too, but destroys the rest" },
  frozen: { rank: "reads", reversible: true, every: 16, fetch: "trim", about: "keeps what was read most often, chosen anew every 16 steps; a quarter of the heads keep all" },
  optimum: { rank: "next", reversible: true, every: 1, fetch: "miss", about: "knows the future: gives up what is read again last" },
  lfu: { rank: "reads", reversible: true, every: 1, fetch: "miss", about: "keeps what was read most often" },
  fifo: { rank: "born", reversible: true, every: 1, fetch: "miss", about: "gives up the page that was first read earliest" },
  full: { rank: "recency", reversible: true, every: 0, fetch: "miss", about: "keeps every page" },
};

// head: {nSteps, nPages, ptr, page, whole}: wants of step t are page[ptr[t] .. ptr[t + 1] - 1], in canonical order.
// Returns {grid: Uint8Array [page * nSteps + step], misses: [step], resident: [step] at its end, total}.
WakeKV.replay = function replay(head, name, budget) {
  const policy = WakeKV.POLICIES[name];
  const { nSteps, nPages, ptr, page } = head;
  const keepsAll = policy.every === 0 || (name === "frozen" && head.whole);
  const known = new Uint8Array(nPages), resident = new Uint8Array(nPages);
  const recency = new Float64Array(nPages).fill(-1), reads = new Float64Array(nPages), born = new Float64Array(nPages);
  const next = policy.rank === "next" ? nextUses(head) : null;
  const soonest = new Float64Array(nPages).fill(nSteps);
  const grid = new Uint8Array(nPages * nSteps), misses = new Uint32Array(nSteps), held = new Uint32Array(nSteps);
  const ranks = { recency: (p) => recency[p], reads: (p) => reads[p], born: (p) => born[p] + p * 1e-9, next: (p) => -soonest[p] };
  const rank = ranks[policy.rank];
  const best = (a, b) => rank(b) - rank(a) || recency[b] - recency[a];
  for (let step = 0; step < nSteps; step++) {
    const doing = new Map();
    for (let i = ptr[step]; i < ptr[step + 1]; i++) {
      const p = page[i];
      if (!known[p]) {
        known[p] = 1;
        born[p] = step;
        doing.set(p, FIRST);
      } else if (resident[p]) doing.set(p, READ);
      else {
        doing.set(p, policy.reversible ? FETCHED : LOST);
        misses[step]++;
      }
      recency[p] = i + 1;
      reads[p]++;
      if (next) soonest[p] = next[i];
    }
    for (const [p, what] of doing) if (what === FIRST || (what === FETCHED && policy.fetch === "miss")) resident[p] = 1;
    if (policy.every && (step + 1) % policy.every === 0) {
      const from = policy.fetch === "trim" ? known : resident;
      const pages = [];
      for (let p = 0; p < nPages; p++) if (from[p]) pages.push(p);
      if (!keepsAll && pages.length > budget) pages.sort(best).length = budget;
      resident.fill(0);
      for (const p of pages) resident[p] = 1;
    }
    const away = policy.reversible ? RESERVOIR : DESTROYED;
    for (let p = 0; p < nPages; p++) {
      held[step] += resident[p];
      grid[p * nSteps + step] = doing.has(p) ? doing.get(p) : resident[p] ? RESIDENT : known[p] ? away : UNSEEN;
    }
  }
  return { grid, misses, resident: held, total: misses.reduce((a, b) => a + b, 0) };
};

// [want]: the step of the same page's next want; nSteps if there is none.
function nextUses({ nSteps, nPages, ptr, page }) {
  const later = new Float64Array(nPages).fill(nSteps), next = new Float64Array(page.length);
  for (let step = nSteps - 1; step >= 0; step--) {
    for (let i = ptr[step]; i < ptr[step + 1]; i++) next[i] = later[page[i]];
    for (let i = ptr[step]; i < ptr[step + 1]; i++) later[page[i]] = step;
  }
  return next;
}

// A log as the explorer keeps it: one string of base64 around deflated bytes, see wakekv/site/explorer.py.
WakeKV.unpack = async function unpack(log) {
  const packed = Uint8Array.from(atob(log.data), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  const { nSteps, nPages } = log, nHeads = log.heads.length;
  let at = 0;
  const take = (n) => bytes.subarray(at, (at += n));
  const counts = take(nHeads * nSteps);
  const nWants = counts.reduce((a, b) => a + b, 0);
  const low = take(nWants), high = take(nWants);
  const curves = new Uint32Array(bytes.slice(at).buffer); // [policy, head, budget]
  let start = 0;
  const heads = log.heads.map((about, h) => {
    const ptr = new Uint32Array(nSteps + 1);
    for (let t = 0; t < nSteps; t++) ptr[t + 1] = ptr[t] + counts[h * nSteps + t];
    const n = ptr[nSteps], page = new Uint16Array(n);
    for (let i = 0; i < n; i++) page[i] = low[start + i] | (high[start + i] << 8);
    start += n;
    const misses = {};
    log.policies.forEach((name, p) => {
      misses[name] = curves.subarray((p * nHeads + h) * nPages, (p * nHeads + h + 1) * nPages);
    });
    return { ...about, nSteps, nPages, ptr, page, misses, nWants: n };
  });
  return { ...log, data: undefined, heads };
};
