// The run as a whole: its facts, its results, and the table of groups.

const PAGE_ROWS = 300;
const COLUMNS = [
  { name: "group", key: (g) => g.number, numeric: true },
  { name: "task", key: (g) => g.task },
  { name: "level", key: (g) => g.level, optional: (g) => g.level },
  { name: "source", key: (g) => g.source, optional: (g) => g.source },
  { name: "scores", key: (g) => g.members.map((m) => m.score).sort().join() },
  { name: "mean", key: (g) => g.mean, numeric: true },
  { name: "spread", key: (g) => g.spread, numeric: true, title: "standard deviation of the scores" },
  { name: "outcomes", key: (g) => g.outcomes },
  { name: "drawn again", key: (g) => g.draws, numeric: true, optional: (g) => g.draws,
    title: "attempts beyond one for each rollout: what broke was drawn again" },
  { name: "tokens", key: (g) => g.tokens, numeric: true, title: "sampled tokens, mean of its rollouts" },
  { name: "seconds", key: (g) => g.seconds, numeric: true, title: "duration, mean of its rollouts" },
  { name: "cost", key: (g) => g.cost, numeric: true, optional: (g) => g.cost !== null, title: "of all its attempts" },
];

function badge(outcome) {
  return el("span", `badge ${kindOf(outcome)}`, shown(outcome));
}

function scoreBars(members) {
  const bars = el("span", "scores");
  for (const member of members.slice(0, 16)) {
    const bar = titled(el("i", isCorrect(member) ? "correct" : ""), `${score(member.score)} ${member.outcome}`);
    bar.style.setProperty("--score", Math.max(0, Math.min(1, member.score)));
    bars.append(bar);
  }
  if (members.length > 16) bars.append(` +${members.length - 16}`);
  return bars;
}

function overview() {
  const model = run.facts.find(([name]) => name === "model");
  return [
    el("header", "", el("h1", "", "Run report"), model ? el("p", "model", shown(model[1])) : null),
    facts(run.facts.filter((fact) => fact !== model)),
    notices(),
    livePanel(),
    tiles(),
    el("div", "panels", outcomePanel(), scorePanel(), usePanel()),
    correctPanel(),
    lossPanel(),
    timelinePanel(),
    groupTable(),
    badTasks(),
  ];
}

function notices() {
  const { rollout_lines: rollouts, group_lines: groups } = run.skipped;
  const list = el("ul", "notices");
  for (const warning of run.warnings) list.append(el("li", "warning", shown(warning)));
  for (const note of run.notes) list.append(el("li", "", shown(note)));
  if (rollouts) list.append(el("li", "warning", `Unreadable and not shown: ${counted(rollouts, "line")} of rollouts.jsonl.`));
  if (groups) list.append(el("li", "warning", `Unreadable and not shown: ${counted(groups, "line")} of the groups file.`));
  if (run.forgotten) {
    list.append(el("li", "warning",
      `The figures are of all attempts. Groups, medians and slots are of the last ${whole(run.rollouts.length)}; ` +
      `${counted(run.forgotten, "earlier one")} of ${counted(run.forgotten_groups, "group")} can be read in rollouts.jsonl.`));
  }
  if (run.left_out) {
    list.append(el("li", "warning",
      `To keep this file small it has the steps and tokens of ${whole(run.rollouts.length - run.left_out)} of ` +
      `${counted(run.rollouts.length, "attempt")}, groups with right and wrong answers first. All the others are in the table; rollouts.jsonl has everything.`));
  }
  return list.childElementCount ? list : null;
}

function tiles() {
  const { totals } = run;
  if (totals === null) return null;
  const start = new Date(totals.began === null ? NaN : totals.began * 1000);
  const tile = (value, name, more) => el("div", "tile", el("b", "", value), el("span", "", name), more ? el("small", "", more) : null);
  const underWay = run.groups.filter(isUnderWay).length;
  const dropped = Math.max(0, totals.groups - totals.written - underWay);
  const others = [dropped ? `${whole(dropped)} not written` : "", underWay ? `${whole(underWay)} under way` : ""].filter(Boolean);
  return el("section", "tiles",
    tile(whole(totals.written), totals.written === 1 ? "group written" : "groups written", others.join(", ") || "none dropped"),
    tile(whole(totals.mixed), "with mixed scores", `${whole(totals.divided)} right and wrong`),
    tile(whole(totals.scored), totals.scored === 1 ? "rollout scored" : "rollouts scored", `${counted(totals.attempts, "attempt")} in all`),
    tile(score(totals.scored ? totals.score / totals.scored : null), "mean score", `${whole(totals.solved)} correct`),
    tile(whole(totals.scored_tokens), "tokens sampled", "in scored rollouts"),
    totals.cost === null ? null : tile(money(totals.cost), "cost", totals.trained
      ? `${money(totals.cost / totals.written)} a written group, ${money(totals.cost / totals.trained)} a trained rollout` : ""),
    tile(totals.began === null ? "–" : seconds(totals.ended - totals.began), "wall clock",
      isNaN(start) ? "" : start.toISOString().slice(0, 16).replace("T", " ") + " UTC"));
}

function panel(title, ...children) {
  return el("section", "panel", el("h2", "", title), ...children);
}

function outcomePanel() {
  const { totals } = run;
  const all = [...(totals ? totals.outcomes : [])];
  if (totals && totals.bad_tasks) all.push(["bad_task", totals.bad_tasks]);
  const most = Math.max(1, ...all.map(([, number]) => number));
  const rows = (failed) => {
    const list = el("div", "bars");
    for (const [name, number] of all.filter(([n]) => (kindOf(n) === "failed") === failed)) {
      const bar = el("i", kindOf(name));
      bar.style.setProperty("--share", number / most);
      list.append(el("span", "name", shown(name)), el("span", "track", bar), el("span", "number", whole(number)));
    }
    return list.childElementCount ? list : el("p", "none", "none");
  };
  return panel("Outcomes",
    el("h3", "", "The policy’s own, scored"), rows(false),
    el("h3", "", "Infrastructure and data, never scored"), rows(true), firstReasons());
}

// Why rollouts were not scored, or scored 0 because grading failed: the first reason of each kind.
function firstReasons() {
  const list = el("ul", "rows");
  for (const [kind, number, reason] of run.totals ? run.totals.not_scored : []) {
    if (reason) list.append(el("li", "", shown(kind), ` (${whole(number)}), the first: `, el("span", "reason", shown(reason))));
  }
  return list.childElementCount ? list : null;
}

// Why groups were not written, and what was drawn again.
function lossPanel() {
  const rows = (title, entries) => {
    const list = el("ul", "rows");
    for (const [number, what, why] of entries) {
      list.append(el("li", "", `${whole(number)} × `, shown(what), why ? el("span", "reason", " ", shown(why)) : null));
    }
    return entries.length ? el("div", "", el("h2", "", title), list) : null;
  };
  const { dropped, drawn_again: again, repeated } = run.totals || { dropped: [], drawn_again: [], repeated: 0 };
  const drawn = again.map(([outcome, number, why]) => [number, outcome, why && `the first: ${why}`]);
  if (repeated) drawn.push([repeated, "a request for a completion, repeated within its rollout", ""]);
  const parts = [rows("Groups that were not written", dropped.slice(0, 12).map(([why, number]) => [number, why, ""])),
    rows("Drawn again", drawn)].filter(Boolean);
  return parts.length ? el("section", "panel wide split", ...parts) : null;
}

function correctPanel() {
  const parts = ["level", "source"].map(correctBy).filter(Boolean);
  return parts.length ? el("section", "panel wide split", ...parts) : null;
}

// The share of correct rollouts for each level or source, where there are several.
function correctBy(field) {
  const found = Object.entries(run.totals ? run.totals.parts[field] : {}).filter(([, [, all]]) => all);
  if (found.length < 2) return null;
  const list = el("div", "bars");
  for (const [name, [correct, all]] of found.slice(0, 10)) {
    const bar = el("i", "finished");
    bar.style.setProperty("--share", correct / all);
    list.append(el("span", "name", shown(name)), el("span", "track", bar), el("span", "number", `${whole(correct)} of ${whole(all)}`));
  }
  return el("div", "", el("h2", "", `Correct by ${field}`), list);
}

function scorePanel() {
  const { scored, scores: bins } = run.totals || { scored: 0 };
  if (!scored) return panel("Scores", el("p", "none", "no rollout was scored"));
  const most = Math.max(...bins.map(([a, b]) => a + b));
  const chart = svg("svg", { viewBox: "0 0 420 170", class: "histogram", role: "img" },
    svg("title", {}, `Scores of ${scored} rollouts in 20 steps from 0 to 1`));
  bins.forEach(([correct, wrong], place) => {
    const [high, low] = [(correct / most) * 130, (wrong / most) * 130];
    const bar = svg("g", {}, svg("title", {},
      `${(place / 20).toFixed(2)} to ${((place + 1) / 20).toFixed(2)}: ${correct} correct, ${wrong} not`));
    const x = 10 + place * 20;
    bar.append(svg("rect", { x, y: 15, width: 18, height: 130, class: "empty" }));
    bar.append(svg("rect", { x, y: 145 - low, width: 18, height: low, class: "wrong" }));
    bar.append(svg("rect", { x, y: 145 - low - high, width: 18, height: high, class: "correct" }));
    if (correct + wrong) {
      bar.append(svg("text", { x: x + 9, y: 141 - low - high, "text-anchor": "middle" }, brief(correct + wrong)));
    }
    chart.append(bar);
  });
  chart.append(svg("line", { x1: 8, x2: 412, y1: 145.5, y2: 145.5 }));
  for (const tick of [0, 0.25, 0.5, 0.75, 1]) {
    chart.append(svg("text", { x: 10 + tick * 400, y: 162, "text-anchor": "middle" }, String(tick)));
  }
  return panel("Scores", chart, el("p", "legend", el("i", "correct"), "correct ", el("i", "wrong"), "not correct"));
}

function usePanel() {
  const done = run.rollouts.filter((r) => r.score !== null);
  const uses = el("table", "use");
  const head = ["per scored rollout", "median", "90 %", "max"].map((name) => el("th", "", name));
  uses.append(el("thead", "", el("tr", "", ...head)));
  const body = el("tbody");
  const measures = [
    ["from its assignment", "duration_s", seconds], ["waiting for completions", "waiting_s", seconds],
    ["CPU in the sandbox", "cpu_s", seconds], ["until the sandbox ran", "launch_s", seconds],
    ["requests repeated", "retries", whole], ["tokens sampled", "tokens", whole], ["prompt tokens, all calls", "prompt_tokens", whole],
    ["steps", "steps", whole], ["tool calls", "calls", whole],
  ];
  if (known(done.map((r) => r.staleness)).length) measures.push(["policy versions behind", "staleness", whole]);
  for (const [name, field, format] of measures) {
    const sorted = known(done.map((r) => r[field]));
    const cells = [0.5, 0.9, 1].map((share) => el("td", "", format(quantile(sorted, share))));
    body.append(el("tr", "", el("td", "", name), ...cells));
  }
  uses.append(body);
  return panel("Time and tokens", uses);
}

function badTasks() {
  if (!run.bad_tasks.length) return null;
  const list = el("ul", "rows");
  for (const bad of run.bad_tasks) {
    list.append(el("li", "", el("code", "", shown(bad.task)), " ", shown(bad.reason)));
  }
  const more = run.totals.bad_tasks - run.bad_tasks.length;
  return el("section", "panel wide", el("h2", "", `Bad tasks (${whole(run.totals.bad_tasks)})`),
    el("p", "none", "Rows of the data set no rollout could be made of."), list,
    more > 0 ? el("p", "none", `${whole(more)} more are in rollouts.jsonl`) : null);
}

const table = { sort: COLUMNS[0], down: false, limit: PAGE_ROWS, rows: [], chosen: -1, search: "", which: "", outcome: "" };

// The next group in the table as sorted and filtered; for a group not in the table, the next of all.
function neighbour(group, step) {
  const rows = table.rows.includes(group) ? table.rows : run.groups;
  return rows[rows.indexOf(group) + step];
}

function groupTable() {
  const columns = COLUMNS.filter((c) => !c.optional || run.groups.some(c.optional));
  const search = el("input");
  Object.assign(search, { type: "search", id: "search", placeholder: "task, question or answer" });
  search.setAttribute("aria-label", "search in task, question and answers");
  const choice = (label, options) => {
    const select = el("select");
    select.setAttribute("aria-label", label);
    for (const [value, text] of options) {
      const option = el("option", "", shown(text));
      option.value = value;
      select.append(option);
    }
    return select;
  };
  const which = choice("which groups", [["", "all groups"], ["mixed", "mixed scores"], ["divided", "right and wrong"], ["written", "written"], ["dropped", LIVE ? "not written yet" : "not written"]]);
  which.id = "which";
  const names = counts(run.rollouts.map((r) => r.outcome)).map(([name]) => name);
  const outcome = choice("outcome", [["", "any outcome"], ...names.map((name) => [name, name])]);
  outcome.id = "outcome";
  const told = el("span", "told");
  const body = el("tbody");
  const more = button("Show more", () => { table.limit += PAGE_ROWS; fill(); });
  const heads = columns.map((column) => {
    const head = el("th", `${column.numeric ? "numeric" : ""} c-${column.name}`);
    head.scope = "col";
    head.append(button(column.name, () => {
      table.down = table.sort === column ? !table.down : false;
      table.sort = column;
      fill();
    }));
    if (column.title) head.title = column.title;
    return head;
  });

  search.value = table.search;
  which.value = table.which;
  outcome.value = table.outcome;

  function fill() {
    Object.assign(table, { search: search.value, which: which.value, outcome: outcome.value });
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const passes = (g) => words.every((word) => g.text.includes(word)) &&
      (!which.value || (which.value === "dropped" ? !g.written : g[which.value])) &&
      (!outcome.value || g.attempts.some((r) => r.outcome === outcome.value));
    table.rows = run.groups.filter(passes).sort((a, b) => {
      const [x, y] = [table.sort.key(a), table.sort.key(b)];
      if (x === null || y === null) return (x === null) - (y === null);  // unknown values last in both directions
      return (x < y ? -1 : x > y ? 1 : 0) * (table.down ? -1 : 1) || a.number - b.number;
    });
    heads.forEach((head, place) => {
      if (columns[place] === table.sort) head.setAttribute("aria-sort", table.down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    body.replaceChildren(...table.rows.slice(0, table.limit).map((g) => groupRow(g, columns)));
    table.chosen = -1;
    told.textContent = table.rows.length === run.groups.length
      ? counted(run.groups.length, "group") : `${whole(table.rows.length)} of ${counted(run.groups.length, "group")}`;
    more.hidden = table.rows.length <= table.limit;
  }

  search.addEventListener("input", fill);
  which.addEventListener("change", fill);
  outcome.addEventListener("change", fill);
  fill();
  return el("section", "panel wide", el("h2", "", "Groups"),
    el("div", "tools", search, which, outcome, told),
    el("div", "scroll", el("table", "groups", el("thead", "", el("tr", "", ...heads)), body)), more);
}

function groupRow(group, columns) {
  const cells = {
    group: () => link(`#group-${group.number}`, "", String(group.number)),
    task: () => titled(el("span", "cut", shown(group.task), el("small", "", shown(group.question.slice(0, 160)))),
      group.question.slice(0, 400)),
    level: () => shown(group.level),
    source: () => shown(group.source),
    scores: () => scoreBars(group.members),
    mean: () => score(group.mean),
    spread: () => score(group.spread),
    outcomes: () => el("span", "badges", group.written ? null : titled(el("span", "badge dropped", isUnderWay(group) ? "under way" : "not written"), group.dropped),
      ...counts(group.attempts.map((r) => r.outcome)).map(([name, number]) => {
        const mark = badge(name);
        if (number > 1) mark.append(` ×${number}`);
        return mark;
      })),
    "drawn again": () => whole(group.draws),
    tokens: () => whole(group.tokens),
    seconds: () => seconds(group.seconds),
    cost: () => money(group.cost),
  };
  const row = el("tr", "", ...columns.map((c) => el("td", `${c.numeric ? "numeric" : ""} c-${c.name}`, cells[c.name]())));
  row.addEventListener("click", (event) => {
    if (!event.target.closest("a") && !String(getSelection())) location.hash = `#group-${group.number}`;
  });
  return row;
}
