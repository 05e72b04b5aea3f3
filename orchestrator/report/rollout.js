// One group side by side, and one rollout step by step.

const PARTS = { thought: true, code: true, output: true };
const TOKENS_AT_ONCE = 3000;
const CHANCES = [[0.9, "≥ 90 %"], [0.5, "≥ 50 %"], [0.2, "≥ 20 %"], [0.05, "≥ 5 %"], [0.01, "≥ 1 %"], [0, "< 1 %"]];

function groupView(group) {
  const broken = group.attempts.filter((r) => r.score === null && !r.running);
  const running = live.running.filter((r) => r.group === group.number);
  const beside = (text, other) => other ? link(`#group-${other.number}`, "step", text) : el("span", "step", text);
  return [
    el("nav", "path", link(overviewHash(), "", "Run"), el("span", "", `Group ${group.number}`), el("span", "space"),
      beside("← previous group", neighbour(group, -1)), beside("next group →", neighbour(group, 1))),
    el("header", "", el("h1", "", shown(group.task)), el("p", "",
      group.written ? null : el("span", "badge dropped", isUnderWay(group) ? "under way" : run.evaluation ? "not complete" : "not written to the groups file"),
      group.mixed ? el("span", "badge mixed", "mixed scores") : null,
      shown([group.level && `level ${group.level}`, group.source].filter(Boolean).join(" · ")))),
    group.dropped && !group.written ? el("p", "warning box", shown(`Not written: ${group.dropped}`)) : null,
    group.question ? el("pre", "question", shown(group.question)) : null,
    group.reference === null ? null : el("section", "panel wide", el("h2", "", "Reference answer"), el("pre", "answer", shown(group.reference))),
    facts([["mean score", score(group.mean)], ["spread", score(group.spread)],
      ["scored rollouts", whole(group.members.length)], ["attempts", whole(group.attempts.length)],
      ["tokens, mean", whole(group.tokens)], ["seconds, mean", seconds(group.seconds)]]),
    treePanel(group),
    group.members.length ? el("div", "cards", ...group.members.map((member) => memberCard(member, group))) : el("p", "none", "No rollout of this group was scored."),
    running.length ? el("section", "panel wide", el("h2", "", "Under way"), el("p", "", ...running.flatMap((r) => [link(rolloutHash(r), "", shown(r.id)), " "]))) : null,
    broken.length ? el("section", "panel wide", el("h2", "", "Attempts that broke"),
      el("p", "none", "Never scored: nothing here was the policy’s doing."), brokenList(broken)) : null,
  ];
}

// The rollouts of a group below those that they branched from. Null: none did.
function treePanel(group) {
  const branches = group.members.filter((r) => r.parent);
  if (!branches.length) return null;
  const names = new Set(group.members.map((r) => r.id));
  const leaf = (rollout) => el("li", "", link(rolloutHash(rollout), "leaf", el("span", isCorrect(rollout) ? "score correct" : "score", score(rollout.score)),
    " ", shown(rollout.id)), " ", el("small", "", `${counted(rollout.tokens, "token")} of its own`), ...forks(rollout));
  const forks = (parent) => [...new Set(branches.filter((r) => r.parent === parent.id).map((r) => r.turn))].sort((a, b) => a - b)
    .map((turn) => el("div", "fork", el("small", "", `from turn ${turn}`),
      el("ul", "", ...branches.filter((r) => r.parent === parent.id && r.turn === turn).map(leaf))));
  return el("section", "panel wide", el("h2", "", "Tree"), el("ul", "tree", ...group.members.filter((r) => !names.has(r.parent)).map(leaf)));
}

// How much better than its group a rollout is: what policy gradients push by.
function advantage(rollout, group) {
  if (rollout.score === null || group.mean === null) return "–";
  const over = rollout.score - group.mean;
  const sign = over > 0 ? "+" : "";
  return group.spread ? `${sign}${over.toFixed(3)} (${sign}${(over / group.spread).toFixed(2)} σ)` : `${sign}${over.toFixed(3)}`;
}

// In a tree each stretch of turns has its own, beside its siblings: no number stands for a whole rollout.
function advantageFact(rollout, group) {
  return rollout.score === null || group.members.some((r) => r.parent) ? [] : [["advantage", advantage(rollout, group)]];
}

function memberCard(rollout, group) {
  const parts = Object.entries(rollout.parts).map(([name, value]) => {
    const bar = el("i", "share");
    bar.style.setProperty("--share", Math.max(0, Math.min(1, value)));
    return [name, el("span", "", el("span", "track", bar), score(value))];
  });
  const place = el("span", "score", score(rollout.score));
  if (isCorrect(rollout)) place.classList.add("correct");
  return el("article", "card",
    el("div", "top", place, badge(rollout.outcome, isCorrect(rollout))),
    rollout.reason ? el("p", "reason", shown(rollout.reason)) : null,
    run.shared ? null : el("h3", "", "Answer"),
    run.shared ? null : rollout.answer === null ? el("p", "none", "none") : el("pre", "answer", shown(rollout.answer)),
    parts.length ? el("h3", "", "Score parts") : null,
    facts(parts, "parts"),
    facts([...advantageFact(rollout, group), ["steps", whole(rollout.steps)], ["tool calls", whole(rollout.calls)], ["tokens", whole(rollout.tokens)],
      ["time", seconds(rollout.duration_s)], ["CPU", seconds(rollout.cpu_s)]], "small"),
    el("div", "open", link(rolloutHash(rollout), "", hasDetails(rollout) ? "Step by step →" : "Facts only"), besideLink(rollout, group)));
}

function hasDetails(rollout) {
  return SERVED || rollout.detail !== null;
}

// To the rollout beside another one of its group: the next that was scored otherwise, else the next.
function besideLink(rollout, group) {
  const place = group.members.indexOf(rollout);
  const others = [...group.members.slice(place + 1), ...group.members.slice(0, place)].filter(hasDetails);
  const other = others.find((r) => r.solved !== rollout.solved) || others.find((r) => r.score !== rollout.score) || others[0];
  return other && hasDetails(rollout) ? link(besideHash(rollout, other), "", `beside ${isCorrect(other) ? "a right" : "another"} one`) : null;
}

function besideHash(rollout, other) {
  return `#beside-${encodeURIComponent(rollout.id)}/${encodeURIComponent(other.id)}`;
}

// Two rollouts of a group, turn by turn. The first turn in which the model wrote something else is marked.
async function besideView(...pair) {
  const group = groupOf.get(pair[0].group);
  const details = await Promise.all(pair.map(detailsOf));
  const choice = (side) => {
    const select = el("select");
    select.setAttribute("aria-label", side ? "the right rollout" : "the left rollout");
    for (const rollout of group.members.filter(hasDetails)) {
      const option = el("option", "", shown(`${rollout.id}, score ${score(rollout.score)}`));
      [option.value, option.selected] = [rollout.id, rollout === pair[side]];
      select.append(option);
    }
    select.addEventListener("change", () => {
      const chosen = pair.map((rollout, place) => (place === side ? rolloutOf.get(select.value) : rollout));
      location.hash = besideHash(...chosen);
    });
    return select;
  };
  const head = (side) => el("div", "", choice(side), el("p", "", badge(pair[side].outcome, isCorrect(pair[side])), " ",
    link(rolloutHash(pair[side]), "", "alone")));
  const path = el("nav", "path", link(overviewHash(), "", "Run"), link(`#group-${group.number}`, "", `Group ${group.number}`), el("span", "", "two side by side"));
  if (details.includes(null)) return [path, el("p", "warning box", missingNote(pair[details.indexOf(null)]))];
  const [left, right] = details.map((one) => [...stepsOf(one).children]);
  const said = details.map((one) => one.completions.map((c) => c.text));
  const first = Array.from({ length: Math.max(said[0].length, said[1].length) }).findIndex((_, place) => said[0][place] !== said[1][place]);
  const grid = el("div", "beside", head(0), head(1));
  for (let place = 0; place < Math.max(left.length, right.length); place += 1) {
    if (place === first) grid.append(el("p", "differs", "Here they differ first."));
    grid.append(...[left, right].map((side) => side[place] || el("div")));
  }
  return [path, el("header", "", el("h1", "", shown(group.task)), first < 0 ? el("p", "", "They say the same.") : null), toggles(), grid];
}

function missingNote(rollout) {
  if (run.shared) return "Answers and steps are left out of this file, which is for sharing.";
  if (SERVED) return `The line of ${plain(rollout.id)} cannot be read any more.`;
  return `The steps of ${plain(rollout.id)} are not in this file, to keep it small. To see them: orchestrator view ${plain(run.directory || run.name)} --rollout ${plain(rollout.id)}`;
}

function brokenList(rollouts) {
  const list = el("ul", "rows");
  for (const rollout of rollouts) {
    list.append(el("li", "", badge(rollout.outcome), " ", link(rolloutHash(rollout), "", shown(rollout.id)), " ",
      el("span", "reason", shown(rollout.reason))));
  }
  return list;
}

function rolloutHash(rollout) {
  return `#rollout-${encodeURIComponent(rollout.id)}`;
}

async function rolloutView(rollout) {
  const group = groupOf.get(rollout.group);
  const details = await detailsOf(rollout);
  const siblings = group.attempts;
  const place = siblings.indexOf(rollout);
  const beside = (text, other) => other ? link(rolloutHash(other), "step", text) : el("span", "step", text);
  const page = [
    el("nav", "path", link(overviewHash(), "", "Run"), link(`#group-${group.number}`, "", `Group ${group.number}`),
      el("span", "", shown(rollout.id)), el("span", "space"),
      beside("← previous attempt", siblings[place - 1]), beside("next attempt →", siblings[place + 1])),
    el("header", "", el("h1", "", shown(group.task)),
      el("p", "", rollout.running ? el("span", "badge dropped", "under way") : badge(rollout.outcome, isCorrect(rollout)), rollout.reason ? el("span", "reason", shown(rollout.reason)) : null,
        branchNote(rollout),
        run.directory && copier("copy the command that replays it", `orchestrator replay ${quoted(run.directory)} --rollout ${quoted(rollout.id)}`),
        rollout.score === null || !run.directory ? null : copier("copy the command that branches at the open turn", () => branchCommand(rollout)),
        besideLink(rollout, group))),
    group.question ? el("pre", "question", shown(group.question)) : null,
    facts([["score", score(rollout.score)], ...advantageFact(rollout, group),
      ...Object.entries(rollout.parts).map(([name, value]) => [name, score(value)]),
      ["steps", whole(rollout.steps)], ["tokens sampled", whole(rollout.tokens)], ["prompt tokens", whole(rollout.prompt_tokens)],
      ...(rollout.cost === null ? [] : [["cost", money(rollout.cost)]]),
      ["from its assignment", seconds(rollout.duration_s)], ["waiting for completions", seconds(rollout.waiting_s)],
      ["CPU", seconds(rollout.cpu_s)], ["launch", seconds(rollout.launch_s)], ["token ids", rollout.token_source || "–"],
      ...(rollout.untrained ? [["of them in other lines", `${(100 * rollout.untrained).toFixed(1)} %`]] : []),
      ...(details && details.completions.some((c) => c.aside)
        ? [["completions aside", whole(details.completions.filter((c) => c.aside).length)]] : []),
      ...(details ? requestFacts(details.requests) : []),
      ...(details && details.exit ? [["sandbox ended", details.exit]] : []),
      ...(details && details.sampling.seed !== undefined ? [["sampling seed", String(details.sampling.seed)]] : [])]),
    rollout.answer === null && group.reference === null ? null : el("section", "panel wide split", ...[["Answer", rollout.answer], ["Reference answer", group.reference]]
      .map(([name, text]) => text === null ? null : el("div", "", el("h2", "", name), el("pre", "answer", shown(text)))).filter(Boolean)),
  ];
  for (const [turn, tokens, reason, refused] of rollout.continued || []) {
    page.push(el("p", "warning box", turn ? `It went on behind turn ${whole(turn)} in another sandbox, with ${whole(tokens)} tokens kept: ` : "It could not go on: ", shown(reason), refused ? el("span", "reason", " ", shown(refused)) : null));
  }
  if (details === null) {
    return [...page, el("p", "warning box", missingNote(rollout))];
  }
  for (const note of details.notes) page.push(el("p", "warning box", shown(note)));
  return [...page, tokenPanel(details.tokens), ...gradePanel(details.grade), ...details.step_grades.flatMap((step) => gradePanel(step.grade, `How step ${step.name} was graded`)), ...changesPanel(details.changes),
    courseOf(rollout, details), ...requestsPanel(details.requests), ...servicesPanel(details.services), toggles(), stepsOf(details, rollout)];
}

function branchNote(rollout) {
  if (rollout.begun_in) return el("span", "", shown(`begun at turn ${rollout.turn} of ${rollout.begun_in}`), " ");
  if (!rollout.parent) return null;
  const parent = rolloutOf.get(rollout.parent);
  const name = shown(`${rollout.parent}, turn ${rollout.turn}`);
  return el("span", "", "branched from ", parent ? link(`${rolloutHash(parent)}/${rollout.turn}`, "", name) : name, " ");
}

// At the turn that the address names, else at the last one.
function branchCommand(rollout) {
  return `orchestrator branch ${quoted(run.directory)} --rollout ${quoted(rollout.id)}${current.turn ? ` --turn ${current.turn}` : ""}`;
}

// As a word for a POSIX shell.
function quoted(word) {
  return /^[\w@%+=:,./-]+$/.test(word) ? word : `'${plain(word).replaceAll("'", "'\\''")}'`;
}

// What the task's grader found in the state that the agent left.
const SCOPES = { declared: "what the task declares", solution: "the folders of its solution", whole: "all but what could take the tests over" };

function gradePanel(grade, title = "How it was graded") {
  if (grade === null) return [];
  const passed = grade.tests.filter((test) => test.outcome === "passed").length;
  const told = grade.fault ? "no reward" : Object.entries(grade.rewards).map(([name, value]) => `${name} ${score(value)}`).join(", ");
  const tests = grade.tests.length ? `, ${passed} of ${counted(grade.tests.length, "test")} passed` : "";
  return [folded([shown(title), el("small", "", told + tests)], "panel wide grade", () => el("div", "",
    grade.fault ? el("p", "warning box", shown(grade.fault)) : null,
    ...grade.flags.map((flag) => el("p", "warning box", shown(flag))),
    el("p", "none", shown(`${SCOPES[grade.scope] || grade.scope}: ${grade.kept.join(", ")}; ${grade.source || "no reward file"}; `
      + `${seconds(grade.duration_s)}, CPU ${seconds(grade.cpu_s)}`)),
    ...grade.tests.map((test) => el("p", "", el("span", `badge ${{ passed: "finished", failed: "failed", error: "failed" }[test.outcome] || ""}`,
      shown(test.outcome)), " ", el("code", "", shown(test.name)), el("small", "", shown(test.detail)))),
    ...["stdout", "stderr"].filter((name) => grade[name]).map((name) => folded([name], "prompt", () => el("pre", "", shown(grade[name])))))),
  ];
}

// Of the sandbox's file system, where it could be written to.
const LEFT_OUT = { device: "devices", pipe: "pipes", socket: "sockets", name: "odd names", link: "links that lead out",
  size: "files too large together", depth: "folders too deep", unreadable: "unreadable", more: "not looked at", set_id: "set-id bits" };

function changesPanel(changes) {
  if (changes === null) return [];
  const left = Object.entries(changes.left_out).map(([why, count]) => `${LEFT_OUT[why]} ${whole(count)}`);
  const title = ["What it changed", el("small", "", `${counted(changes.count, "file")}, ${whole(changes.size_bytes)} bytes`)];
  return [folded(title, "panel wide changes", () => el("div", "",
    ...changes.files.map(changeOf),
    changes.count > changes.files.length ? el("p", "none", `${counted(changes.count - changes.files.length, "more change")} not listed`) : null,
    left.length ? el("p", "none", `Left out: ${left.join(", ")}`) : null))];
}

function changeOf(change) {
  const facts = change.kind === "removed" ? "" : `${whole(change.size_bytes)} bytes, mode ${change.mode}`;
  const title = [el("span", "badge", shown(change.kind)), " ", el("code", "", shown(change.path)), el("small", "", facts)];
  if (change.diff === null) return el("p", "", ...title);
  return folded(title, "prompt", () => el("pre", "diff", ...change.diff.split("\n").map((line) =>
    el("span", { "+": "more", "-": "less", "@": "faint" }[line[0]] || "", shown(line), "\n"))));
}

function toggles() {
  const bar = el("div", "toggles", "Show");
  for (const part of Object.keys(PARTS)) {
    const box = el("input");
    Object.assign(box, { type: "checkbox", checked: PARTS[part] });
    box.addEventListener("change", () => { PARTS[part] = box.checked; applyToggles(); });
    bar.append(el("label", "", box, part));
  }
  return bar;
}

function applyToggles() {
  for (const part of Object.keys(PARTS)) view.classList.toggle(`no-${part}`, !PARTS[part]);
}

// The place of the last completion that had ended when the call began.
function askedBy(call, completions) {
  return Math.max(0, completions.findLastIndex((c) => c.ended_s <= call.started_s));
}

// Steps come from the sandbox in order, one for each action completion; tool calls are placed by time.
function stepsOf(details, rollout) {
  const steps = [...details.steps].sort((a, b) => a.step_number - b.step_number);
  const list = el("div", "timeline");
  let action = 0;
  details.completions.forEach((completion, place) => {
    const of = (one) => askedBy(one, details.completions) === place;
    const [calls, requests] = [details.tool_calls.filter(of), details.requests.shown.filter(of)];
    const step = completion.kind === "action" ? steps[action++] : undefined;
    const title = completion.kind === "action" ? `Step ${action}` : completion.kind === "plan" ? "Plan" : "Final answer";
    const card = completionCard(title, completion, step, calls, requests, details.code_tags);
    if (rollout) {
      card.id = `turn-${place + 1}`;
      card.querySelector("h2").append(link(`${rolloutHash(rollout)}/${place + 1}`, "anchor", "#"));
    }
    list.append(card);
  });
  if (!details.completions.length) list.append(el("p", "none", "No completion was served."));
  for (const step of steps.slice(action)) {
    list.append(el("article", "turn", el("h2", "", `Step ${step.step_number}, without a recorded completion`), ...output(step)));
  }
  return list;
}

function completionCard(title, completion, step, calls, requests, tags) {
  const refused = requests.filter((one) => one.refusal).length;
  const told = [counted(completion.tokens, "token"), `sampled in ${seconds(took(completion))}`, `prompt of ${whole(completion.prompt_tokens)}`,
    completion.finish_reason === "length" ? "cut by length" : null,
    completion.retries ? counted(completion.retries, "retry", "retries") : null,
    completion.segment ? `token line ${completion.segment + 1}` : null,
    completion.aside ? "asked aside: not the main line" : null,
    completion.inherited ? "inherited: sampled and trained in the rollout it branched from" : null,
    completion.abandoned ? "nobody got this answer" : null,
    completion.policy_version ? `policy ${completion.policy_version}` : null,
    step && step.duration_s !== null ? `${seconds(step.duration_s)} with its code` : null,
    requests.length ? `${counted(requests.length, "request")} to the outside${refused ? `, ${whole(refused)} refused` : ""}` : null];
  return el("article", completion.inherited ? "turn inherited" : "turn",
    el("h2", "", title, el("small", "", shown(told.filter(Boolean).join(" · ")))),
    promptParts(completion),
    completion.reasoning.trim() ? folded(["Reasoning, which the agent did not get"], "prompt",
      () => el("pre", "", shown(completion.reasoning.trim()))) : null,
    ...(completion.text || !completion.reasoning ? modelText(completion.text, tags) : []),
    ...(tags.length || !step || !step.code ? [] : [part("code", step.code)]),
    calls.length ? el("div", "part-output", ...calls.map(toolCall)) : null,
    ...(step ? output(step) : []));
}

function promptParts(completion) {
  if (!completion.messages.length) return null;
  const system = completion.messages.filter((m) => m.role === "system");
  const others = completion.messages.filter((m) => m.role !== "system");
  const box = (label, messages) => folded([label], "prompt", () => el("div", "", ...messages.map((m) =>
    el("div", "message", el("h3", "", shown(m.role), copier("copy", m.content)), el("pre", "", shown(m.content))))));
  return el("div", "prompts", system.length ? box("System prompt", system) : null,
    others.length ? box(`${counted(others.length, "new message")} in the prompt`, others) : null);
}

// What the model wrote, in its own order: thought, code between the agent's tags, thought again.
function modelText(text, [open, close]) {
  const pieces = [];
  const add = (kind, piece) => { if (piece.trim()) pieces.push(part(kind, piece)); };
  let from = 0;
  while (open) {
    const start = text.indexOf(open, from);
    if (start < 0) break;
    const end = text.indexOf(close, start + open.length);
    add("thought", text.slice(from, start));
    add("code", text.slice(start + open.length, end < 0 ? text.length : end));
    from = end < 0 ? text.length : end + close.length;
  }
  add("thought", text.slice(from));
  return pieces.length ? pieces : [el("p", "none", "The completion is empty.")];
}

function part(kind, text) {
  return el("div", `part part-${kind}`, el("h3", "", kind, kind === "code" ? copier("copy", text.trim()) : null),
    el("pre", "", kind === "code" ? coloured(text.replace(/^\n+|\s+$/g, "")) : shown(text.trim())));
}

// Of an MCP server, or a tool of the host.
function toolKind(call) {
  const server = Object.hasOwn(run.mcp_tools, call.name) ? run.mcp_tools[call.name] : "";
  return server ? `MCP ${server}` : "tools";
}

function toolCall(call) {
  const kind = toolKind(call);
  return el("div", "part tool", el("h3", "", shown(kind === "tools" ? "tool " : `${kind}: `), el("code", "", shown(call.name)), el("small", "", seconds(took(call)))),
    el("pre", "arguments", shown(call.arguments)),
    call.output === null ? null : el("pre", "", shown(call.output)),
    call.error === null ? null : el("pre", "error", shown(call.error)));
}

function output(step) {
  const error = step.error_type || step.error;
  return [
    step.observations ? el("div", "part part-output", el("h3", "", "output"), el("pre", "", shown(step.observations))) : null,
    error ? el("div", "part part-output failed", el("h3", "", "error ", el("code", "", shown(step.error_type))),
      el("pre", "error", shown(step.error))) : null,
    step.is_final_answer ? el("p", "final part-output", "This step gave the final answer.") : null,
  ];
}

function tokenPanel(line) {
  if (line === null) return el("p", "none", "No tokens: this attempt is not in the groups file, or without token ids.");
  const trained = line.runs.reduce((sum, length, place) => sum + (place % 2 ? length : 0), 0);
  return folded(["Tokens", el("small", "", `${counted(line.total, "token")}, ${whole(trained)} trained`)], "panel wide tokens",
    () => tokenView(line));
}

function tokenView(line) {
  const entries = line.entries || JSON.parse(document.getElementById("token-table").textContent);
  const told = el("p", "told", "Point at a token, or walk with the arrow keys, to see its id and probability.");
  const text = el("div", "ids");
  text.tabIndex = 0;
  text.setAttribute("role", "group");
  text.setAttribute("aria-label", "tokens");
  const classes = line.runs.flatMap((length, place) => Array(length).fill(place % 2 === 1));
  const logprobs = [];
  const first = classes.indexOf(true);
  let next = 0;
  for (const trained of classes) logprobs.push(trained && line.logprobs ? line.logprobs[next++] : null);

  function token(place) {
    const [id, piece] = entries[line.tokens[place]];
    const chance = logprobs[place] === null ? null : Math.exp(-logprobs[place] / 1000);
    const level = chance === null ? "unknown" : CHANCES.findIndex(([least]) => chance >= least);
    const span = el("span", classes[place] ? `t p-${level}` : "m");
    if (piece === null) span.append(`${id} `);
    else if (piece === "") span.append(el("span", "control", "·"));  // its character begins in another token, or ends in one
    else span.append(shown(piece.replace(/\n/g, "\u23ce\n")));
    span.dataset.place = place;
    if (place === first) requestAnimationFrame(() => { text.scrollTop = span.offsetTop - text.offsetTop - 80; });
    return span;
  }

  function more(from) {
    const until = Math.min(from + TOKENS_AT_ONCE, line.tokens.length);
    for (let place = from; place < until; place += 1) text.append(token(place));
    if (until < line.tokens.length) requestAnimationFrame(() => more(until));
    else if (line.total > until) text.append(` … ${counted(line.total - until, "more token")} in the groups file`);
  }

  let at = null;

  function tell(span) {
    if (at) at.classList.remove("at");
    at = span;
    span.classList.add("at");
    const place = Number(span.dataset.place);
    const id = entries[line.tokens[place]][0];
    const logprob = logprobs[place] === null ? "" : `, log-prob ${(-logprobs[place] / 1000).toFixed(3)}, probability ${(100 * Math.exp(-logprobs[place] / 1000)).toFixed(2)} %`;
    told.textContent = span.title = `place ${place}, id ${id}, ${classes[place] ? "trained" : "masked"}${logprob}`;
  }

  text.addEventListener("pointerover", (event) => {
    const span = event.target.closest("[data-place]");
    if (span) tell(span);
  });
  told.setAttribute("role", "status");
  text.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 20, ArrowUp: -20 }[event.key];
    if (!step || event.ctrlKey || event.metaKey || event.altKey) return;
    const from = at ? Number(at.dataset.place) + step : Math.max(0, first);
    const span = text.querySelector(`[data-place="${Math.max(0, Math.min(line.tokens.length - 1, from))}"]`);
    if (!span) return;
    event.preventDefault();
    tell(span);
    span.scrollIntoView({ block: "nearest" });
  });
  more(0);
  const legend = el("p", "legend", el("span", "m", "masked"));
  if (line.logprobs) for (const [place, [, label]] of CHANCES.entries()) legend.append(el("span", `t p-${place}`, label));
  else legend.append(el("span", "t p-unknown", "trained, no log-probs"));
  legend.append(copier("copy the ids", () => JSON.stringify(line.tokens.map((place) => entries[place][0]))));
  return el("div", "", legend, told, text);
}
