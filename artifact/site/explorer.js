// The explorer: a log, a head, a policy, a budget; its pages by steps, its miss curve, and the text it reads.
// Everything is on the page or beside it: a log is a script (logs/NAME.js), so that this works from a folder, offline.
"use strict";

{
  const $ = (id) => document.getElementById(id);
  const config = JSON.parse($("config").textContent); // {logs: [{name, label}], styles: {policy: {color, dash}}}
  const logs = new Map(), waiting = new Map();
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let log = null, head = null, shown = null, heat = null, curve = null;

  WakeKV.log = (given) => waiting.get(given.name)?.(given);

  function load(name) {
    if (!logs.has(name)) {
      logs.set(name, new Promise((found, lost) => {
        waiting.set(name, (given) => found(WakeKV.unpack(given)));
        const script = document.createElement("script");
        script.src = `logs/${name}.js`;
        script.onerror = () => lost(new Error(`logs/${name}.js is not beside this page`));
        document.head.append(script);
      }));
    }
    return logs.get(name);
  }

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const percent = (x) => `${(100 * x).toFixed(1)} %`;
  const count = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;

  function option(value, text) {
    const made = document.createElement("option");
    made.value = value;
    made.textContent = text;
    return made;
  }

  // ---- what is chosen: in the form's fields, and in the address, so that figures can link to it

  const wanted = () => Object.fromEntries(new URLSearchParams(location.hash.slice(1)));

  async function choose(asked) {
    const name = config.logs.some((l) => l.name === asked.log) ? asked.log : config.logs[0].name;
    $("log").value = name;
    $("status").textContent = "loading the log";
    try {
      log = await load(name);
    } catch (error) {
      $("status").textContent = error.message;
      return;
    }
    const budget = Math.min(Math.max(1, Math.round(+asked.budget) || 32), log.nPages);
    const policy = log.policies.includes(asked.policy) ? asked.policy : "reactive";
    $("policy").replaceChildren(...log.policies.map((p) => option(p, p)));
    $("policy").value = policy;
    for (const id of ["budget", "budget-number"]) $(id).max = log.nPages;
    $("budget").value = $("budget-number").value = budget;
    const rate = (h) => percent(h.misses.reactive[Math.min(32, log.nPages) - 1] / h.nWants);
    $("head").replaceChildren(...log.heads.map((h) => option(h.id, `${h.id} (layer ${h.layer}): reactive misses ${rate(h)} at 32`)));
    const before = head?.id;
    head = log.heads.find((h) => h.id === +asked.head) ?? log.heads.find((h) => h.id === before) ?? dearest();
    $("head").value = head.id;
    $("step").max = log.nSteps - 1;
    const most = WakeKV.replay(head, policy, budget).misses;
    const step = asked.step === undefined ? most.indexOf(Math.max(...most)) : Math.round(+asked.step) || 0;
    $("step").value = Math.min(Math.max(0, step), log.nSteps - 1);
    $("window").value = ["all", "200", "60"].includes(asked.window) ? asked.window : "all";
    writeText();
    replayed();
  }

  // The head to begin with: among those that want no more than the budget at a typical step, where destroying costs most.
  function dearest() {
    const b = Math.min(32, log.nPages) - 1;
    const loss = (h) => (h.nWants > 32 * log.nSteps ? -1 : (h.misses.evict[b] - h.misses.reactive[b]) / h.nWants);
    return log.heads.reduce((a, h) => (loss(h) > loss(a) ? h : a));
  }

  function remember() {
    const now = { log: log.name, head: head.id, policy: $("policy").value, budget: $("budget").value, step: $("step").value };
    if ($("window").value !== "all") now.window = $("window").value;
    history.replaceState(null, "", `#${new URLSearchParams(now)}`);
  }

  // ---- the replay, and the three views of it

  function replayed() {
    const policy = $("policy").value, budget = +$("budget").value;
    shown = WakeKV.replay(head, policy, budget);
    const mean = shown.resident.reduce((a, b) => a + b, 0) / log.nSteps;
    const agrees = shown.total === head.misses[policy][budget - 1];
    $("summary").textContent =
      `${policy} at ${count(budget, "page")}: ${shown.total} of ${head.nWants} wants miss (${percent(shown.total / head.nWants)}), ` +
      `${mean.toFixed(1)} pages resident on average. ` +
      (agrees ? "" : `wakekv counts ${head.misses[policy][budget - 1]}: this page is wrong. `) +
      `${policy} ${WakeKV.POLICIES[policy].about}` +
      (policy === "frozen" && head.whole ? ", and this is one of them." : ".");
    $("summary").dataset.agrees = agrees;
    $("about").textContent = `${log.model}, ${log.regime}: ${log.recorded}; ${log.nPrompt} prompt tokens, ${log.nSteps} steps; head ${head.id} of ${log.nHeads}`;
    drawHeat();
    drawCurve();
    markText();
    stepped();
  }

  function span() {
    const size = $("window").value === "all" ? log.nSteps : Math.min(+$("window").value, log.nSteps);
    const first = Math.min(Math.max(0, Math.round(+$("step").value - size / 2)), log.nSteps - size);
    return [first, first + size];
  }

  const axis = (label, more) => ({
    label, stroke: colour("--ink"), grid: { show: false }, ticks: { stroke: colour("--line") },
    font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif", labelSize: 20, ...more,
  });

  function drawHeat() {
    const place = $("heat"), width = place.clientWidth, height = Math.round(Math.min(460, Math.max(280, width * 0.6)));
    const [first, last] = span();
    heat?.destroy();
    heat = new uPlot({
      width, height, legend: { show: false }, padding: [8, 8, 0, 0],
      cursor: { drag: { x: false, y: false }, points: { show: false }, y: false },
      scales: { x: { time: false, range: [first, last] }, y: { range: [0, log.nPages] } },
      axes: [axis("decode step"), axis("page, oldest below", { size: 44 })],
      series: [{}, { paths: () => null, points: { show: false } }],
      hooks: { drawClear: [paint], draw: [marks] },
    }, [Array.from({ length: log.nSteps + 1 }, (_, t) => t), new Array(log.nSteps + 1).fill(0)], place);
    heat.over.addEventListener("click", (event) => goTo(Math.floor(heat.posToVal(event.offsetX, "x"))));
  }

  // Cells, in runs of one state; what matters most last, so that it stays visible where a step is less than a pixel.
  function paint(u) {
    const { ctx } = u, [first, last] = span(), x = (t) => u.valToPos(t, "x", true), y = (p) => u.valToPos(p, "y", true);
    ctx.save();
    for (const state of [1, 4, 6, 3, 2, 5, 7]) {
      ctx.fillStyle = colour(`--state-${state}`);
      for (let p = 0; p < log.nPages; p++) {
        const top = Math.round(y(p + 1)), tall = Math.max(1, Math.round(y(p)) - top);
        for (let t = first; t < last; t++) {
          if (shown.grid[p * log.nSteps + t] !== state) continue;
          const from = t;
          while (t + 1 < last && shown.grid[p * log.nSteps + t + 1] === state) t++;
          ctx.fillRect(x(from), top, Math.max(1, x(t + 1) - x(from)), tall);
        }
      }
    }
    ctx.restore();
  }

  // The needle's pages at the left edge, the prompt's end, and the chosen step.
  function marks(u) {
    const { ctx } = u, y = (p) => u.valToPos(p, "y", true), { left, top, width, height } = u.bbox;
    const step = +$("step").value, ratio = devicePixelRatio || 1;
    ctx.save();
    ctx.fillStyle = colour("--needle");
    for (const p of needlePages()) ctx.fillRect(left, y(p + 1), 5 * ratio, Math.max(2 * ratio, y(p) - y(p + 1)));
    ctx.strokeStyle = colour("--ink");
    ctx.lineWidth = ratio;
    ctx.setLineDash([4 * ratio, 3 * ratio]);
    const end = y(Math.ceil(log.nPrompt / log.pageTokens));
    ctx.beginPath();
    ctx.moveTo(left, end);
    ctx.lineTo(left + width, end);
    ctx.stroke();
    ctx.setLineDash([]);
    const a = u.valToPos(step, "x", true), b = u.valToPos(step + 1, "x", true);
    ctx.strokeRect(a, top, Math.max(2, b - a), height);
    ctx.restore();
  }

  const needlePages = () => {
    const pages = new Set();
    for (const [start, stop] of log.needle)
      for (let p = Math.floor(start / log.pageTokens); p <= Math.floor((stop - 1) / log.pageTokens); p++) pages.add(p);
    return pages;
  };

  function drawCurve() {
    const place = $("curve"), width = place.clientWidth, chosen = $("policy").value, budget = +$("budget").value;
    const budgets = Array.from({ length: log.nPages }, (_, b) => b + 1);
    const ink = (name) => (dark.matches && config.styles[name].color === "#000000" ? "#ffffff" : config.styles[name].color);
    curve?.destroy();
    curve = new uPlot({
      width, height: 280, padding: [8, 8, 0, 0], cursor: { drag: { x: false, y: false }, y: false, points: { show: false } },
      scales: { x: { time: false, distr: 3, log: 2 }, y: { range: (u, low, high) => [0, Math.max(0.05, high * 1.02)] } },
      axes: [
        axis("budget, pages", { splits: () => [1, 2, 4, 8, 16, 32, 64, 128, 256, 512].filter((b) => b <= log.nPages) }),
        axis("miss rate, less is better", { size: 48 }),
      ],
      series: [
        { label: "budget" },
        ...log.policies.map((name) => ({
          label: name, stroke: ink(name), dash: config.styles[name].dash, width: name === chosen ? 3 : 1.2, points: { show: false },
          value: (u, v) => (v == null ? "–" : v.toFixed(3)),
        })),
      ],
      hooks: {
        ready: [(u) => u.setCursor({ left: u.valToPos(budget, "x"), top: 10 })],
        draw: [(u) => {
          const { ctx } = u, x = u.valToPos(budget, "x", true);
          ctx.save();
          ctx.strokeStyle = colour("--ink");
          ctx.beginPath();
          ctx.moveTo(x, u.bbox.top);
          ctx.lineTo(x, u.bbox.top + u.bbox.height);
          ctx.stroke();
          ctx.beginPath();
          ctx.arc(x, u.valToPos(head.misses[chosen][budget - 1] / head.nWants, "y", true), 4 * (devicePixelRatio || 1), 0, 7);
          ctx.fillStyle = ink(chosen);
          ctx.fill();
          ctx.stroke();
          ctx.restore();
        }],
      },
    }, [budgets, ...log.policies.map((name) => Array.from(head.misses[name], (n) => n / head.nWants))], place);
    curve.over.addEventListener("click", (event) => setBudget(budgets[curve.posToIdx(event.offsetX)]));
  }

  // ---- the text, and one step of it

  function writeText() {
    $("text").replaceChildren(...Array.from({ length: log.nSteps }, (_, t) => {
      const token = document.createElement("span");
      token.textContent = log.pieces[log.nPrompt + t];
      token.dataset.step = t;
      return token;
    }));
  }

  function markText() {
    for (const token of $("text").children) {
      const missed = shown.misses[token.dataset.step];
      token.className = missed > 2 ? "misses many" : missed ? "misses" : "";
      token.title = `step ${token.dataset.step}: ${count(missed, "miss").replace("misss", "misses")}`;
    }
  }

  function pageText(p) {
    const from = p * log.pageTokens;
    return log.pieces.slice(from, from + log.pageTokens).join("");
  }

  function stepped() {
    const step = +$("step").value, by = WakeKV.STATES.map(() => []);
    for (let p = 0; p < log.nPages; p++) by[shown.grid[p * log.nSteps + step]].push(p);
    const [, resident, read, first, reservoir, fetched, destroyed, lost] = by.map((pages) => pages.length);
    const parts = [`reads ${count(read + first + fetched + lost, "page")}`];
    if (first) parts.push(`${first} for the first time`);
    if (fetched) parts.push(`${fetched} missed and fetched`);
    if (lost) parts.push(`${lost} missed and gone for good`);
    parts.push(`${resident} resident and not read`);
    if (reservoir) parts.push(`${reservoir} in the reservoir`);
    if (destroyed) parts.push(`${destroyed} destroyed`);
    $("status").textContent = `Step ${step} of ${log.nSteps - 1}, writing “${log.pieces[log.nPrompt + step]}”: ${parts.join(", ")}.`;
    $("step-out").textContent = step;
    const needle = needlePages(), missed = [...by[5], ...by[7]];
    $("missed").replaceChildren(...missed.slice(0, 6).map((p) => {
      const item = document.createElement("li"), quote = document.createElement("q");
      quote.textContent = pageText(p);
      item.append(`page ${p}${needle.has(p) ? " (part of a needle)" : ""}, ${lost ? "gone" : "fetched"}: `, quote);
      return item;
    }));
    $("missed-more").textContent = missed.length ? count(missed.length, "page") + (missed.length > 6 ? ", the first six with what they hold" : ", with what they hold") : "nothing";
    const now = $("text").children[step];
    $("text").querySelector(".now")?.classList.remove("now");
    now.classList.add("now");
    $("text").scrollTop = now.offsetTop - $("text").clientHeight / 2;
    remember();
  }

  function goTo(step) {
    $("step").value = step; // the field keeps it within the log
    if ($("window").value === "all") heat.redraw(false);
    else drawHeat();
    stepped();
  }

  function setBudget(budget) {
    $("budget").value = $("budget-number").value = Math.min(Math.max(1, Math.round(budget) || 1), log.nPages);
    replayed();
  }

  // ---- wiring

  $("log").replaceChildren(...config.logs.map((l) => option(l.name, l.label)));
  $("log").addEventListener("change", () => {
    head = null;
    choose({ log: $("log").value, policy: $("policy").value, budget: $("budget").value });
  });
  $("head").addEventListener("change", () => {
    head = log.heads.find((h) => h.id === +$("head").value);
    replayed();
  });
  $("policy").addEventListener("change", replayed);
  $("budget").addEventListener("input", () => setBudget(+$("budget").value));
  $("budget-number").addEventListener("change", () => setBudget(+$("budget-number").value));
  $("step").addEventListener("input", () => goTo(+$("step").value));
  $("window").addEventListener("change", () => goTo(+$("step").value));
  $("text").addEventListener("click", (event) => event.target.dataset.step && goTo(+event.target.dataset.step));
  $("next-miss").addEventListener("click", () => {
    const from = +$("step").value;
    for (let i = 1; i <= log.nSteps; i++) if (shown.misses[(from + i) % log.nSteps]) return goTo((from + i) % log.nSteps);
  });
  addEventListener("hashchange", () => choose(wanted()));
  dark.addEventListener("change", () => log && replayed());
  let resizing = 0, wide = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === wide || !log) return; // a phone's bars coming and going
    wide = innerWidth;
    cancelAnimationFrame(resizing);
    resizing = requestAnimationFrame(replayed);
  });
  choose(wanted());
}
