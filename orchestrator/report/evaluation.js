// The first screen of an evaluation: how good, how sure, where it fails, what it cost.

function percent(share) {
  return `${(100 * share).toFixed(1)} %`;
}

function intervalText([value, low, high]) {
  return `${percent(value)} (${percent(low)} to ${percent(high)})`;
}

// A share on a line from 0 to 100 %, with its interval and a tick at each quarter.
function intervalBar([value, low, high]) {
  const bar = el("span", "interval", el("i"), el("b"));
  for (const [name, at] of Object.entries({ value, low, high })) bar.style.setProperty(`--${name}`, at);
  return bar;
}

function measuredTiles() {
  const { totals, evaluation } = run;
  const tile = (value, name, more) => el("div", "tile", el("b", "", value), el("span", "", name), more ? el("small", "", more) : null);
  const [all] = evaluation.parts;
  const sure = ([, low, high]) => `95 %: ${percent(low)} to ${percent(high)}`;
  const [first, last] = [all.estimates[0], all.estimates.at(-1)];
  const missing = [evaluation.missing ? `${whole(evaluation.missing)} ${run.going_on ? "to come or missing" : "missing"}` : "",
    totals.bad_tasks ? counted(totals.bad_tasks, "bad task") : ""].filter(Boolean);
  return el("section", "tiles",
    tile(first ? percent(first[0]) : "–", "accuracy, pass@1", first ? sure(first) : "no sample was judged"),
    evaluation.sizes.length > 1 ? tile(last ? percent(last[0]) : "–", `pass@${evaluation.sizes.at(-1)}`, last ? sure(last) : "no task has so many") : null,
    tile(score(all.score), "mean score", `${whole(all.correct)} of ${counted(all.samples, "sample")} right`),
    tile(whole(evaluation.tasks), evaluation.tasks === 1 ? "task" : "tasks", [`${whole(evaluation.samples_per_task)} a task`, ...missing].join(", ")),
    ...outsideTiles(tile),
    totals.cost === null ? null : tile(money(totals.cost), "cost, all attempts", all.correct ? `${money(totals.cost / all.correct)} a right sample` : ""),
    tile(totals.began === null ? "–" : seconds(totals.ended - totals.began), "from the first rollout to the last", ""));
}

function accuracyPanel() {
  const { sizes, parts } = run.evaluation;
  const shown_ = sizes.length > 1 ? [0, sizes.length - 1] : [0];
  const heads = shown_.map((place) => {
    const head = columnHead(`pass@${sizes[place]}, 95 %`);
    head.className = "wide-cell";
    return head;
  });
  const table = el("table", "use", el("thead", "", el("tr", "", columnHead("of"), ...heads,
    ...["mean score", "right", "samples", "tasks"].map((name) => columnHead(name)))));
  const body = el("tbody");
  for (const part of parts) {
    body.append(el("tr", "", rowHead(shown(part.label)), ...shown_.map((place) => {
      const estimate = part.estimates[place];
      return el("td", "wide-cell", ...(estimate ? [intervalBar(estimate), intervalText(estimate)] : ["–"]));
    }), el("td", "", score(part.score)), ...[part.correct, part.samples, part.tasks].map((n) => el("td", "", whole(n)))));
  }
  table.append(body);
  return el("section", "panel wide", el("h2", "", "Accuracy", el("small", "", "Wilson’s intervals over tasks; a tick each quarter from 0 to 100 %")),
    scrolled(table, "accuracy by level and source"), passCurve());
}

// pass@k for each k: what more samples of a task are worth.
function passCurve() {
  const { sizes, parts: [all] } = run.evaluation;
  if (sizes.length < 3) return null;
  const list = el("div", "bars curve");
  sizes.forEach((k, place) => {
    const estimate = all.estimates[place];
    if (estimate) list.append(el("span", "name", `pass@${k}`), intervalBar(estimate), el("span", "number", intervalText(estimate)));
  });
  return el("div", "", el("h3", "", "All tasks"), list);
}

// Each outcome by whether the task was solved so.
function confusionPanel() {
  const table = el("table", "use", el("thead", "", el("tr", "", ...["ended as", "right", "wrong", "not judged"].map((name) => columnHead(name)))));
  const body = el("tbody");
  const sums = [0, 0, 0];
  for (const [outcome, times, right] of run.totals.outcomes) {
    const cells = kindOf(outcome) === "failed" ? [0, 0, times] : [right, times - right, 0];
    cells.forEach((number, place) => { sums[place] += number; });
    body.append(el("tr", "", rowHead(link(`#?${new URLSearchParams({ outcome })}`, "", shown(outcome))),
      ...cells.map((number, place) => el("td", number && place === 0 ? "correct" : "", number ? whole(number) : "–"))));
  }
  body.append(el("tr", "sum", rowHead("all attempts"), ...sums.map((number) => el("td", "", whole(number)))));
  table.append(body);
  return panel("Outcomes, right and wrong", scrolled(table, "outcomes, right and wrong"), el("p", "none", "Not judged: it broke, and not by the model’s doing."), firstReasons());
}

function hardestPanel() {
  const { hardest, unsolved } = run.evaluation;
  if (!hardest.length) return panel("Hardest tasks", el("p", "none", run.totals.scored ? "Every sample is right." : "No sample was judged."));
  const list = el("ul", "rows");
  for (const [number, task, right, all] of hardest) {
    const group = groupOf.get(number);
    list.append(el("li", "", `${whole(right)} of ${whole(all)} `, group || SERVED ? link(`#group-${number}`, "", shown(task)) : shown(task),
      group && group.question ? el("span", "reason", " ", shown(group.question.slice(0, 120))) : null));
  }
  return panel("Hardest tasks", el("p", "none", link("#?which=wrong", "", `${whole(unsolved)} never solved`), " · ", link("#?sort=mean", "", "all, the hardest first")), list);
}

function measuredPanels() {
  return [measuredTiles(), notices(), accuracyPanel(), el("div", "panels two", confusionPanel(), hardestPanel()),
    el("div", "panels two", scorePanel(), usePanel())];
}
