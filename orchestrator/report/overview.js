// The run as a whole: its facts, its results, and the table of groups.

const PAGE_ROWS = SERVED ? 100 : 300;
const MOST_ROWS = SERVED ? 2000 : Infinity;
const TYPING = 250;  // milliseconds without a key, before a server is asked
const COURSE_BINS = 12;
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

// `right`: whether a task was solved so; a rollout that finished with a wrong answer is not green.
function badge(outcome, right) {
  return el("span", `badge ${kindOf(outcome) === "finished" && !right ? "ended" : kindOf(outcome)}`, shown(outcome));
}

function scoreBars(members) {
  const bars = el("span", "scores");
  bars.setAttribute("role", "img");
  bars.setAttribute("aria-label", `scores ${members.slice(0, 16).map((m) => score(m.score)).join(", ") || "none"}`);
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
    el("header", "", el("h1", "", shown(run.name || "Run report")), model ? el("p", "model", shown(model[1])) : null),
    nowPanel("now"),
    ...(run.evaluation ? [...measuredPanels(), nowPanel("running")]
      : [tiles(), notices(), nowPanel("running"), el("div", "panels", outcomePanel(), scorePanel(), usePanel())]),
    errorsAndCourse(),
    run.evaluation ? null : correctPanel(),
    lossPanel(),
    timelinePanel(),
    groupTable(),
    badTasks(),
    el("section", "panel wide", el("h2", "", "Settings"), facts(run.facts.filter((fact) => fact !== model))),
  ];
}

// What shows all of a run; of a groups file alone, one rollout at a time.
function viewCommand() {
  return run.directory ? `orchestrator view --serve ${plain(run.directory)}` : `orchestrator view ${plain(run.name)} --rollout ID`;
}

function notices() {
  const { rollout_lines: rollouts, group_lines: groups } = run.skipped;
  const list = el("ul", "notices");
  for (const warning of run.warnings) list.append(el("li", "warning", shown(warning)));
  for (const note of run.notes) list.append(el("li", "", shown(note)));
  if (rollouts) list.append(el("li", "warning", `Unreadable and not shown: ${counted(rollouts, "line")} of rollouts.jsonl.`));
  if (groups) list.append(el("li", "warning", `Unreadable and not shown: ${counted(groups, "line")} of the groups file.`));
  if (SERVED && run.most !== null && run.rollouts.length >= run.most && run.totals.attempts > run.rollouts.length) {
    list.append(el("li", "warning", `Medians, scores over time and slots are of the last ${whole(run.rollouts.length)} attempts; all else is of all.`));
  }
  if (SERVED && run.forgotten) {
    list.append(el("li", "warning", `Of groups with very many attempts, the first ${whole(run.forgotten)} attempts can be read in rollouts.jsonl alone.`));
  } else if (run.forgotten) {
    list.append(el("li", "warning",
      `The figures are of all attempts. Groups, medians and slots are of the last ${whole(run.rollouts.length)}; ` +
      `${counted(run.forgotten, "earlier one")} of ${counted(run.forgotten_groups, "group")} are shown by "${viewCommand()}".`));
  }
  if (run.shared) list.append(el("li", "", "For sharing: reference answers, answers and steps are not in this file, as a right answer tells the reference."));
  if (run.only) list.append(el("li", "warning", shown(`This page has only ${run.only}. The figures are of the whole run.`)));
  if (run.left_out) {
    list.append(el("li", "warning",
      `To keep this file small it has the steps and tokens of ${whole(run.rollouts.length - run.left_out)} of ` +
      `${counted(run.rollouts.length, "attempt")}: of every outcome, and of groups of each kind and level in turns. All the others are in the table; ` +
      `to see them, "${viewCommand()}".`));
  }
  return list.childElementCount ? list : null;
}

function tiles() {
  const { totals } = run;
  if (totals === null) return null;
  const start = new Date(totals.began === null ? NaN : totals.began * 1000);
  const tile = (value, name, more) => el("div", "tile", el("b", "", value), el("span", "", name), more ? el("small", "", more) : null);
  const underWay = SERVED && run.going_on ? run.under_way : 0;
  const dropped = Math.max(0, totals.groups - totals.written - underWay);
  const others = [dropped ? `${whole(dropped)} not written` : "", underWay ? `${whole(underWay)} under way` : ""].filter(Boolean);
  const groups = [["divided", "right and wrong"], ["wrong", "all wrong"], ["right", "all right"]].map(([kind, label]) => {
    const number = { divided: totals.divided, wrong: totals.all_wrong, right: totals.all_right }[kind];
    return link(`#?${new URLSearchParams({ which: kind })}`, "", `${whole(number)} ${label}`);
  });
  return el("section", "tiles",
    tile(totals.scored ? percent(totals.solved / totals.scored) : "–", "of rollouts solved", totals.interval === null ? "none was scored"
      : `${whole(totals.solved)} of ${whole(totals.scored)}; 95 % over groups: ${totals.interval.map(percent).join(" to ")}`),
    tile(score(totals.scored ? totals.score / totals.scored : null), "mean score", `${counted(totals.attempts, "attempt")} in all`),
    tile(whole(totals.written), totals.written === 1 ? "group written" : "groups written", others.join(", ") || "none dropped"),
    el("div", "tile links", el("b", "", whole(totals.mixed)), el("span", "", "with mixed scores"), ...groups),
    tile(whole(totals.scored_tokens), "tokens sampled", "in scored rollouts"),
    ...outsideTiles(tile),
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
    for (const [name, number, right] of all.filter(([n]) => (kindOf(n) === "failed") === failed)) {
      const bar = el("i", kindOf(name) === "failed" ? "failed" : "ended");
      bar.style.setProperty("--share", number / most);
      bar.style.setProperty("--right", right / number || 0);
      list.append(el("span", "name", shown(name)), el("span", "track", bar), el("span", "number", whole(number)));
    }
    return list.childElementCount ? list : el("p", "none", "none");
  };
  return panel("Outcomes",
    el("h3", "", "The policy’s own, scored; solved ones are green"), rows(false),
    el("h3", "", "Infrastructure and data, never scored"), rows(true), firstReasons());
}

function errorsAndCourse() {
  const parts = [errorPanel(), coursePanel()].filter(Boolean);
  return parts.length ? el("div", "panels two", ...parts) : null;
}

// What went wrong most often in steps: the first thing to mend in an agent, its tools or its image.
function errorPanel() {
  const errors = run.totals ? run.totals.errors : [];
  if (!errors.length) return null;
  const list = el("ul", "rows");
  for (const [name, steps, rollouts, example] of errors) {
    list.append(el("li", "", link(`#?${new URLSearchParams({ search: name })}`, "", shown(name)),
      ` in ${counted(rollouts, "rollout")}, ${counted(steps, "step")} `, el("span", "reason", shown(example))));
  }
  return panel("Commonest errors of steps", list);
}

// Scores over time, and by the weights that sampled.
function coursePanel() {
  const timed = run.rollouts.filter((r) => r.score !== null && r.started_at !== null).sort((a, b) => a.started_at - b.started_at);
  if (timed.length < 2 * COURSE_BINS) return null;
  const chart = svg("svg", { viewBox: "0 0 420 150", class: "histogram", role: "img" },
    svg("title", {}, `Mean score and share solved of ${timed.length} rollouts in ${COURSE_BINS} parts, by when they began`));
  const part = (place) => timed.slice(Math.floor((place * timed.length) / COURSE_BINS), Math.floor(((place + 1) * timed.length) / COURSE_BINS));
  const means = Array.from({ length: COURSE_BINS }, (_, place) => {
    const some = part(place);
    return [mean(some.map((r) => r.score)), mean(some.map((r) => Number(isCorrect(r))))];
  });
  for (const [line, name] of [[0, "score"], [1, "solved"]]) {
    const points = means.map((both, place) => `${28 + (place * 382) / (COURSE_BINS - 1)},${125 - 110 * Math.max(0, Math.min(1, both[line]))}`);
    chart.append(svg("polyline", { points: points.join(" "), class: name, fill: "none" }));
  }
  for (const tick of [0, 0.5, 1]) {
    chart.append(svg("line", { x1: 28, x2: 412, y1: 125 - 110 * tick, y2: 125 - 110 * tick }),
      svg("text", { x: 23, y: 129 - 110 * tick, "text-anchor": "end" }, String(tick)));
  }
  const legend = el("p", "legend", el("i", "mean"), "mean score ", el("i", "correct"), "share solved", el("span", "", `${counted(timed.length, "rollout")}, the oldest on the left`));
  return panel("Scores over time", chart, legend, policyBars(timed));
}

function policyBars(timed) {
  const found = new Map();
  for (const rollout of timed.filter((r) => r.policy)) {
    if (!found.has(rollout.policy)) found.set(rollout.policy, []);
    found.get(rollout.policy).push(rollout.score);
  }
  if (found.size < 2) return null;
  const list = el("div", "bars");
  for (const [version, scores] of [...found].slice(-12)) {
    const bar = el("i", "share");
    bar.style.setProperty("--share", Math.max(0, Math.min(1, mean(scores))));
    list.append(el("span", "name", shown(version)), el("span", "track", bar), el("span", "number", `${score(mean(scores))} of ${whole(scores.length)}`));
  }
  return el("div", "", el("h3", "", "Mean score by policy version", found.size > 12 ? el("small", "", "the last 12") : null), list);
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
  const { continued = 0, kept_tokens: kept = 0, not_continued: refused = [] } = run.totals || {};
  const lost = refused.map(([why, number]) => [number, "its rollout could not go on behind its last turn:", why]);
  if (continued) lost.unshift([continued, "its rollout went on in another one:", `${whole(kept)} tokens kept`]);
  if (repeated) drawn.push([repeated, "a request for a completion, repeated within its rollout", ""]);
  const parts = [rows("Groups that were not written", dropped.slice(0, 12).map(([why, number]) => [number, why, ""])),
    rows("Drawn again", drawn), rows("Sandboxes that were lost", lost)].filter(Boolean);
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

// The address of the overview as it is searched, filtered and sorted now.
function overviewHash() {
  const set = { search: table.search, which: table.which, outcome: table.outcome,
    sort: table.sort === COLUMNS[0] ? "" : table.sort.name, down: table.down ? "1" : "" };
  const given = new URLSearchParams(Object.entries(set).filter(([, value]) => value)).toString();
  return given ? `#?${given}` : "#";
}

// Takes what an address says of the table.
function setTable(hash) {
  const given = new URLSearchParams(hash.replace(/^#\??/, ""));
  const text = (name) => given.get(name) || "";
  Object.assign(table, { search: text("search"), which: text("which"), outcome: text("outcome"), down: text("down") === "1",
    sort: COLUMNS.find((c) => c.name === text("sort")) || COLUMNS[0] });
}

const table = { sort: COLUMNS[0], down: false, limit: PAGE_ROWS, rows: [], chosen: -1, search: "", which: "", outcome: "" };

// What a group is called: an evaluation has one of each task.
function groupWord() {
  return run.evaluation ? "task" : "group";
}

// What a server is asked for.
function tableQuery() {
  return Object.fromEntries(new URLSearchParams(overviewHash().slice(2)));
}

// The next group in the table as sorted and filtered; for a group not in the table, the next of all.
function neighbour(group, step) {
  if (SERVED) {
    const number = step < 0 ? group.before : group.after;
    return number === null || number === undefined ? undefined : { number };
  }
  const rows = table.rows.includes(group) ? table.rows : run.groups;
  return rows[rows.indexOf(group) + step];
}

// The groups that the table is to have, of a page that has all.
function fittingGroups() {
  if (table.search) readTranscripts();
  const words = table.search.toLowerCase().split(/\s+/).filter(Boolean);
  const passes = (g) => words.every((word) => g.text.includes(word)) &&
    (!table.which || (table.which === "dropped" ? !g.written : g[table.which])) &&
    (!table.outcome || g.attempts.some((r) => r.outcome === table.outcome));
  const rows = run.groups.filter(passes).sort((a, b) => {
    const [x, y] = [table.sort.key(a), table.sort.key(b)];
    if (x === null || y === null) return (x === null) - (y === null);  // unknown values last in both directions
    return (x < y ? -1 : x > y ? 1 : 0) * (table.down ? -1 : 1) || a.number - b.number;
  });
  return { rows, count: rows.length, all: run.groups.length };
}

let tablePanel = { columns: "" };  // one for as long as it has the same columns and choices

function groupTable() {
  const columns = COLUMNS.filter((c) => !c.optional || (SERVED ? run.columns.includes(c.name) : run.groups.some(c.optional)));
  const outcomes = run.totals ? run.totals.outcomes.map(([name]) => name) : [];
  const has = JSON.stringify([columns.map((c) => c.name), outcomes, run.going_on]);
  if (tablePanel.has !== has) tablePanel = { has, ...newTable(columns, outcomes) };
  tablePanel.show();
  return tablePanel.element;
}

function newTable(columns, outcomes) {
  const search = el("input");
  Object.assign(search, { type: "search", id: "search", placeholder: "task, question, answer, transcript or id" });
  search.setAttribute("aria-label", search.placeholder);
  const choice = (id, label, options) => {
    const select = el("select");
    select.id = id;
    select.setAttribute("aria-label", label);
    for (const [value, text] of options) {
      const option = el("option", "", shown(text));
      option.value = value;
      select.append(option);
    }
    return select;
  };
  const which = choice("which", "which groups", [["", "all groups"], ["mixed", "mixed scores"], ["divided", "right and wrong"], ["wrong", "all wrong"], ["right", "all right"],
    ...(run.evaluation ? [["dropped", "not complete"]] : [["written", "written"], ["dropped", run.going_on ? "not written yet" : "not written"]])]);
  const outcome = choice("outcome", "outcome", [["", "any outcome"], ...outcomes.map((name) => [name, name])]);
  const told = el("span", "told");
  const body = el("tbody");
  const more = button("Show more", () => { table.limit += PAGE_ROWS; fill(); });
  const heads = columns.map((column) => {
    const head = el("th", `${column.numeric ? "numeric" : ""} c-${column.name}`);
    head.scope = "col";
    head.append(button(column.name, () => {
      table.down = table.sort === column ? !table.down : false;
      table.sort = column;
      changed();
    }));
    if (column.title) head.title = column.title;
    return head;
  });
  let asked = 0;

  function fill() {
    const turn = ++asked;
    if (!SERVED) return put(fittingGroups());
    return askGroups(table.limit).then((found) => turn === asked && put(found), () => { told.textContent = AWAY; });
  }

  function put({ rows, count, all }) {
    heads.forEach((head, place) => {
      if (columns[place] === table.sort) head.setAttribute("aria-sort", table.down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    const chosen = table.rows[table.chosen];
    table.rows = rows;
    body.replaceChildren(...rows.slice(0, table.limit).map((g) => groupRow(g, columns)));
    table.chosen = SERVED && chosen ? rows.findIndex((g) => g.number === chosen.number) : -1;
    if (table.chosen >= 0) choose(0);
    told.textContent = count === all ? counted(all, groupWord()) : `${whole(count)} of ${counted(all, groupWord())}`;
    more.hidden = count <= table.limit || table.limit >= MOST_ROWS;
    if (count > MOST_ROWS && more.hidden) told.textContent += `, the first ${whole(MOST_ROWS)} are here: search, or sort otherwise`;
  }

  function changed() {
    Object.assign(table, { search: search.value, which: which.value, outcome: outcome.value });
    fill();
    if (home.hidden) return;  // another address was opened since the last key
    history.replaceState(null, "", overviewHash());
    document.body.dataset.shown = location.hash;
  }

  let typed = 0;
  search.addEventListener("input", () => {
    clearTimeout(typed);
    if (SERVED) typed = setTimeout(changed, TYPING);
    else changed();
  });
  which.addEventListener("change", changed);
  outcome.addEventListener("change", changed);
  const element = el("section", "panel wide", el("h2", "", run.evaluation ? "Tasks" : "Groups"),
    el("div", "tools", search, which, outcome, told),
    scrolled(el("table", "groups", el("thead", "", el("tr", "", ...heads)), body), "the table"), more);
  return { element, show() {
    [search.value, which.value, outcome.value] = [table.search, table.which, table.outcome];
    fill();
  } };
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
    outcomes: () => el("span", "badges", group.written ? null : titled(el("span", "badge dropped", isUnderWay(group) ? "under way" : run.evaluation ? "not complete" : "not written"), group.dropped),
      ...counts(group.attempts.map((r) => r.outcome)).map(([name, number]) => {
        const mark = badge(name, anyCorrect(group.attempts, name));
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
