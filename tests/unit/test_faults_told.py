"""docs/faults.md: every fault a run must survive has a row there, a test here, and outcomes that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from orchestrator.types import EndedName, FailedName

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "faults.md"
FAULTS = "integration/test_faults.py"
BLAME = "integration/test_blame.py"
ENDED = "integration/atropos/test_serve_ended.py"
SLOTS = "integration/atropos/test_serve_slots.py"
RESUME = "integration/test_kill_and_resume.py"
LAUNCHER = "integration/launch/test_docker_launcher.py"
OCI = "integration/launch/test_oci_launcher.py"
FORKED = "integration/launch/test_forked.py"
OCI_RUN = "integration/test_oci_run.py"
TOOLS = "integration/test_web_tools.py"
MCP = "integration/test_mcp_servers.py"
OUTCOME = "unit/test_outcome.py"
BUILDS = "unit/test_builds.py"
AGENT = "integration/test_agent_error.py"
SCORERS = "e2e/test_scorers.py"
NODES, OPENING = "unit/cluster/test_members.py", "unit/cluster/test_opening.py"
WORDS = "integration/test_service_words.py"
STARTUP = "unit/test_startup.py"
LOADING = "e2e/test_loading.py"
RAY = "integration/cluster/test_ray.py"
PASSING = f"{FAULTS}::test_passing_fault_of_the_endpoint_is_retried_and_leaves_no_trace_in_the_data"
LASTING = f"{FAULTS}::test_lasting_fault_of_one_task_costs_that_group_only"

# Row of the table → tests that fail without what it says.
WEIGHTS = "integration/test_new_weights.py"
ROWS = {
    "endpoint: 429": [PASSING, f"{FAULTS}::test_when_one_call_is_asked_to_wait_all_calls_wait"],
    "endpoint: 500, 502, 503, reset, cut off, name not found": [PASSING, LASTING],
    "endpoint: loading or away at the start": [
        f"{STARTUP}::test_a_server_that_is_loading_is_exact_once_it_has_loaded",
        f"{STARTUP}::test_a_refused_connection_is_tried_until_the_server_listens",
        f"{STARTUP}::test_what_never_serves_ends_by_name_when_the_time_is_over",
        f"{STARTUP}::test_a_failing_way_of_ids_is_no_reason_for_text",
        f"{LOADING}::test_a_server_that_begins_to_listen_late_costs_time_and_nothing_else",
        f"{LOADING}::test_a_signal_ends_the_wait_at_once",
    ],
    "endpoint: refuses the probes at the start, or gives unusable ids": [
        f"{STARTUP}::test_a_refused_key_is_not_waited_for",
        f"{STARTUP}::test_a_refusal_is_not_waited_for",
        f"{STARTUP}::test_ids_that_cannot_be_used_are_no_reason_for_text",
        f"{STARTUP}::test_a_server_that_answers_without_ids_is_asked_for_text_and_the_reason_is_kept",
        f"{LOADING}::test_where_text_is_all_there_is_the_run_says_so_wherever_people_look",
    ],
    "endpoint: slow or hung": [
        PASSING,
        f"{FAULTS}::test_hung_completion_is_an_infrastructure_failure_and_retried",
        f"{BLAME}::test_a_prompt_that_only_the_policy_made_too_slow_is_its_own_timeout",
        "integration/test_completion.py::test_a_cancelled_completion_is_cancelled_upstream",
    ],
    "endpoint: gone for a while": [
        f"{FAULTS}::test_endpoint_that_goes_and_comes_back_costs_time_and_nothing_else"
    ],
    "endpoint: garbage, missing or wrong ids, log-probs or counts": [
        PASSING,
        "integration/test_completion.py::test_a_spoilt_answer_is_never_taken",
    ],
    "endpoint: nesting, numbers or lengths beyond all sense, compressed": [
        "unit/test_strange_answers.py::test_ids_of_any_shape",
        "unit/test_strange_answers.py::test_chat_of_any_shape",
        "unit/test_strange_answers.py::test_chat_that_is_longer_than_what_was_asked_for",
        "unit/test_strange_answers.py::test_ids_that_are_longer_than_what_was_asked_for",
    ],
    "endpoint: a sample that was filtered, has no text or unknown ids": [
        f"{BLAME}::test_a_sample_that_cannot_be_used_is_a_sample",
        f"{BLAME}::test_samples_that_are_filtered_are_wrong_where_a_model_is_measured",
        f"{BLAME}::test_what_the_control_gets_too_is_the_endpoints_and_is_drawn_again",
    ],
    "endpoint: aborts a completion, as for new weights": [
        f"{WEIGHTS}::test_an_aborted_completion_is_continued_with_what_it_has",
        f"{WEIGHTS}::test_a_server_that_aborts_everything_at_once_is_a_failure",
        f"{WEIGHTS}::test_what_was_sampled_before_an_abort_outlives_failures_behind_it",
        f"{WEIGHTS}::test_what_was_sampled_before_an_abort_is_no_free_draw_if_only_its_continuation_fails",
        f"{WEIGHTS}::test_what_every_request_behind_an_abort_fails_on_is_the_endpoints",
    ],
    "endpoint: vLLM says that it is paused": [f"{WEIGHTS}::test_a_pause_is_waited_for_and_is_no_failure"],
    "endpoint: llama.cpp's adapters are swapped": [
        f"{WEIGHTS}::test_llamacpps_cache_is_not_used_once_its_adapters_have_changed"
    ],
    "endpoint: 404, 402 and other statuses that no text causes": [
        f"{WORDS}::test_a_status_that_no_text_causes_and_that_passes_costs_no_rollout",
        f"{WORDS}::test_one_server_of_five_that_lacks_the_model_costs_no_rollout",
    ],
    "endpoint: answers in words of its own": [
        f"{WORDS}::test_a_whole_answer_is_one_whatever_its_finish_reason_is_called",
        f"{WORDS}::test_an_answer_that_was_cut_off_says_so_in_whatever_words",
        "unit/test_chat_answers.py::test_a_content_in_parts_is_text_and_reasoning",
    ],
    "endpoint: refuses a parameter, stop strings or a system message": [
        "unit/test_refused_parameters.py::test_what_a_service_refuses_costs_no_rollout_a_completion",
        "unit/test_refused_parameters.py::test_a_temperature_that_is_not_taken_is_said_and_never_replaced",
    ],
    "endpoint: 401, 403, no credit left (402, `insufficient_quota`)": [
        f"{WORDS}::test_an_account_without_credit_ends_the_run_soon_with_the_services_words",
        f"{FAULTS}::test_refused_key_in_mid_run_stops_it_with_one_line_and_keeps_what_is_finished",
        f"{BLAME}::test_a_refusal_of_one_rollouts_text_ends_no_other_rollout",
        f"{BLAME}::test_a_task_whose_text_is_refused_is_no_refused_key_and_no_rollout_is_scored",
    ],
    "endpoint: 400": [
        f"{FAULTS}::test_run_in_which_nearly_everything_breaks_ends_and_names_the_cause",
        f"{BLAME}::test_printed_text_that_an_endpoint_fails_on_is_the_policys_own_end",
    ],
    "endpoint: prompt too long": [
        f"{FAULTS}::test_prompt_that_is_too_long_is_the_policys_own_end",
        f"{OUTCOME}::test_a_task_that_does_not_fit_is_the_data_s_fault",
    ],
    "MCP server: ends, hangs, prints garbage, answers 100 MB": [
        f"{MCP}::test_a_server_that_a_call_killed_is_begun_anew_and_nobody_is_drawn_again",
        f"{MCP}::test_a_server_that_hangs_is_begun_anew",
        f"{MCP}::test_garbage_between_the_lines_is_passed_over",
        f"{MCP}::test_an_answer_of_100_megabytes_costs_its_own_call_alone",
        f"{MCP}::test_only_who_had_no_call_under_way_ends_as_tool_error",
    ],
    "web tool: refused, 429, 5xx, huge, binary, private address": [
        f"{TOOLS}::test_a_service_that_is_down_is_an_error_without_the_key",
        f"{TOOLS}::test_a_large_page_is_cut_and_says_so",
        f"{TOOLS}::test_a_redirect_to_a_denied_page_shows_nothing_of_it",
        f"{TOOLS}::test_a_search_that_was_chosen_to_fail_earns_no_other_attempt",
        f"{TOOLS}::test_a_failing_service_ends_the_rollout_only_where_that_was_asked_for",
    ],
    "sandbox: code killed for memory": [
        f"{FAULTS}::test_container_killed_by_somebody_else_costs_no_token_and_one_short_of_memory_is_scored",
        "integration/attacks/test_attacks.py::test_the_attack_is_contained_and_earns_nothing",
    ],
    "sandbox: pid 1 or the runner killed for memory, or crashed": [
        f"{LAUNCHER}::test_pid_1_killed_for_memory_is_told",
        f"{FAULTS}::test_sandbox_that_breaks_by_model_written_code_is_scored_and_harms_no_neighbour",
        f"{OUTCOME}::test_every_ending_has_one_name",
    ],
    "a program as agent: no completion": [
        f"{OUTCOME}::test_a_program_without_a_completion_is_the_operator_s_to_mend",
        f"{OUTCOME}::test_no_policy_can_choose_an_agent_error",
        f"{AGENT}::test_a_program_without_a_completion_is_said_at_once_and_tried_again_once",
        f"{AGENT}::test_three_groups_in_a_row_end_the_run_with_the_reason",
        f"{AGENT}::test_a_program_that_fails_on_some_tasks_alone_ends_no_run",
        f"{AGENT}::test_a_program_that_hangs_before_its_first_request_is_one_too",
    ],
    "a program as agent: gives up while its first completion is sampled": [
        f"{AGENT}::test_a_program_that_loses_its_patience_is_no_agent_error"
    ],
    "a program as agent: gives up later, while a completion is sampled": [
        f"{AGENT}::test_a_program_that_loses_its_patience_later_is_excused_if_the_endpoint_is_away"
    ],
    "sandbox: killed, paused or removed by somebody else": [
        f"{FAULTS}::test_container_killed_by_somebody_else_costs_no_token_and_one_short_of_memory_is_scored",
        f"{LAUNCHER}::test_container_that_somebody_else_ends_is_lost",
    ],
    "sandbox: ends with 0 and without a result": [
        f"{OUTCOME}::test_every_ending_has_one_name",
        f"{FAULTS}::test_sandbox_that_breaks_by_model_written_code_is_scored_and_harms_no_neighbour",
    ],
    "sandbox: hangs, stops itself, ignores signals": [
        f"{FAULTS}::test_sandbox_that_breaks_by_model_written_code_is_scored_and_harms_no_neighbour",
        "integration/worker/test_hostile_steps.py::test_a_step_past_its_limit_costs_its_variables",
    ],
    "sandbox: fork, memory, disk, descriptor, log bombs": [
        "integration/attacks/test_attacks.py::test_the_attack_is_contained_and_earns_nothing"
    ],
    "Docker: restarts, hangs, refuses, drops answers": [
        "integration/test_engine_restart.py::test_engine_restart_costs_time_and_nothing_else",
        f"{FAULTS}::test_engine_that_goes_and_comes_back_costs_time_and_nothing_else",
        f"{LAUNCHER}::test_engine_that_fails_at_any_call_is_an_error_of_its_own_and_nothing_stays",
    ],
    "Docker: no space, image removed": [
        f"{FAULTS}::test_run_stopped_while_the_engine_has_no_space_accounts_for_every_group",
        f"{FAULTS}::test_engine_that_goes_and_comes_back_costs_time_and_nothing_else",
        f"{LAUNCHER}::test_ready_tells_an_engine_without_space_from_one_that_works",
    ],
    "Docker: its storage fails in a way that no waiting helps": [
        "unit/test_odd_engine.py::test_an_engine_that_cannot_make_containers_is_named_by_what_fails",
        "unit/test_breaker.py::test_what_no_waiting_ends_is_not_waited_for",
    ],
    "OCI runtime: refuses, hangs for a minute, is gone": [
        f"{OCI}::test_a_runtime_that_refuses_is_a_launch_error_and_leaves_nothing",
        f"{OCI}::test_a_cancel_while_the_runtime_hangs_is_carried_out_when_it_is_over",
    ],
    "OCI runtime: a sandbox is ended by somebody else": [
        f"{OCI_RUN}::test_a_sandbox_ended_by_somebody_else_costs_no_token_and_one_killed_or_short_of_memory_is_scored",
        "unit/test_oci_machine.py::test_whose_doing_an_end_is",
    ],
    "OCI runtime: the keeper is killed": [
        f"{OCI_RUN}::test_a_keeper_killed_in_mid_run_costs_time_and_nothing_else",
        f"{OCI}::test_without_its_keeper_a_sandbox_is_lost_and_the_next_ones_have_another",
    ],
    "[forked sandboxes](oci.md#forked-sandboxes): their parent is killed, or does not answer for a minute": [
        f"{FORKED}::test_with_its_parent_a_sandbox_is_lost_and_the_next_has_another",
        f"{FORKED}::test_a_parent_that_stands_still_costs_a_start_and_its_sandboxes",
    ],
    "forked sandboxes: none gets ready, as modules imported ahead break it": [
        "integration/launch/test_forked_preload.py::"
        "test_where_no_fork_gets_ready_sandboxes_soon_import_for_themselves",
        "unit/test_parents.py::test_a_kind_of_which_no_sandbox_gets_ready_does_without_a_parent",
    ],
    "proxy: call cut in the middle": [
        "integration/test_inside_the_box.py::test_a_cut_completion_is_asked_for_again_under_the_same_number",
        "unit/test_leases.py::test_a_retried_call_gets_the_recorded_answer_and_never_a_second_sample",
    ],
    "SIGTERM, SIGINT, SIGHUP": [
        "integration/test_drain.py::test_first_signal_lets_running_rollouts_finish_and_begins_nothing",
        "integration/test_drain.py::test_after_the_drain_what_runs_is_cancelled_and_recorded_so",
        "integration/test_drain.py::test_second_signal_stops_at_once_and_still_removes_sandboxes",
    ],
    "SIGKILL, loss of power": [
        f"{RESUME}::test_killed_run_resumes_to_the_same_groups",
        f"{RESUME}::test_killed_run_with_containers_resumes_and_removes_them",
        f"{RESUME}::test_containers_end_with_their_orchestrator_and_only_those_of_the_dead_are_removed",
        f"{RESUME}::test_torn_ends_are_set_aside_and_never_parsed",
    ],
    "two orchestrators in one run directory": [
        f"{RESUME}::test_second_orchestrator_is_kept_out_as_long_as_the_first_lives"
    ],
    "disk full: run directory": [
        f"{FAULTS}::test_full_disk_ends_the_run_loudly_without_half_a_line_and_it_resumes"
    ],
    "disk full: TMPDIR": [f"{FAULTS}::test_full_temporary_directory_is_a_launch_error_and_the_run_resumes"],
    "TMPDIR on a network file system, or where no socket can be made": [
        "unit/test_channels.py::test_no_socket_is_put_on_a_network_file_system",
        "unit/test_channels.py::test_a_folder_in_which_a_socket_fails_is_refused_at_once_and_left_empty",
        f"{OPENING}::test_a_node_whose_tmpdir_is_on_a_network_file_system_refuses_itself",
    ],
    "nobody listens: terminal closed, pipe without reader": [
        f"{FAULTS}::test_run_outlives_whoever_listened_to_it",
        "integration/test_drain.py::test_run_under_nohup_outlives_its_terminal",
    ],
    "task that always breaks": [
        "integration/test_dead_tasks.py::test_dead_tasks_are_dropped_the_others_made_and_resume_gets_past",
        "unit/test_breaker.py::test_ten_dead_tasks_in_a_row_end_no_run_and_a_dozen_do",
    ],
    "`serve`: a rollout past `env.worker_timeout`": [
        f"{SLOTS}::test_a_rollout_cut_off_by_the_worker_timeout_ends_as_timeout_and_is_not_drawn_again"
    ],
    "`serve`: a delivery is cut off, by a 5xx, a kill or a restart of the run-api": [
        "integration/atropos/test_feed.py::test_gateway_s_answer_is_no_proof_that_nothing_arrived",
        f"{ENDED}::test_ended_in_the_middle_of_a_delivery",
        f"{ENDED}::test_ended_in_a_delivery_whose_fate_cannot_be_told_it_is_counted_and_not_sent_again",
    ],
    "cluster: a node dies, leaves, or its host actor is killed": [
        f"{NODES}::test_a_node_that_dies_costs_no_retry_and_its_rollouts_are_drawn_elsewhere",
        f"{NODES}::test_an_actor_that_dies_is_started_anew_on_its_node",
        f"{RAY}::test_a_node_that_is_killed_costs_time_and_nothing_else",
    ],
    "cluster: a node hangs": [
        f"{NODES}::test_a_silent_node_is_away_until_it_answers_and_late_results_count_for_nothing"
    ],
    "cluster: a node loses Docker or cannot reach the endpoint": [
        f"{NODES}::test_a_node_without_docker_pauses_itself_and_not_the_run"
    ],
    "cluster: a node's endpoint is loading": [
        f"{OPENING}::test_a_node_whose_endpoint_is_loading_holds_up_no_other_one",
        f"{OPENING}::test_while_all_nodes_wait_for_their_endpoint_the_run_waits_and_says_so_once",
        f"{OPENING}::test_without_an_endpoint_that_serves_in_time_no_node_can_be_used",
    ],
    "cluster: a call of an actor is lost": [f"{NODES}::test_an_actor_that_dies_is_started_anew_on_its_node"],
    "cluster: Ray's head is away": [
        f"{NODES}::test_a_head_that_is_away_is_told_and_its_return_too",
        f"{NODES}::test_a_head_that_stays_away_ends_the_run_in_order_before_it_ends_the_process",
        f"{RAY}::test_a_head_that_is_gone_ends_the_run_in_order_and_another_cluster_goes_on",
    ],
    "cluster: no node works": [f"{NODES}::test_without_any_node_that_works_the_run_ends_by_name"],
    "cluster: the driver is killed": [f"{RAY}::test_a_driver_that_is_killed_leaves_nothing_and_resumes"],
    "a task's Dockerfile fails, hangs or lacks its base": [
        "integration/test_task_images.py::test_a_build_that_fails_is_told_in_one_line",
        f"{BUILDS}::test_a_build_that_hangs_ends_at_its_time",
        f"{BUILDS}::test_rollouts_go_on_while_an_image_is_made_and_a_failed_one_is_a_bad_task",
    ],
    "Docker away, or a full disk, while a Dockerfile is built": [
        f"{BUILDS}::test_a_machine_that_cannot_build_ends_the_run"
    ],
    "no sandbox can be made of a task's image, or for its user": [
        "integration/test_unfit_images.py::test_docker_makes_no_rollout_of_images_that_it_cannot_use",
        "integration/test_unfit_images.py::test_without_an_engine_neither_does_the_launcher_oci",
        "integration/test_unfit_images.py::test_the_run_s_own_image_is_refused_before_it_begins",
    ],
    "a task's working directory cannot be had": [
        "integration/test_unfit_images.py::test_a_working_directory_that_cannot_be_had_is_the_task_s_fault",
        "integration/test_task_place.py::test_a_place_that_cannot_be_had_is_said",
        "unit/test_outcome.py::test_a_place_that_a_task_cannot_have_is_the_data_s_fault",
    ],
    "a task's healthcheck fails for good": [
        "integration/grading/test_healthchecks.py::test_the_agent_finds_what_it_set_up_and_has_no_power_over_it",
        "integration/test_healthcheck.py::test_one_that_never_succeeds_ends_the_task",
    ],
    "Docker away, or a full disk, while a task's image is looked at": [
        f"{BUILDS}::test_what_the_machine_lacks_is_no_task_s_fault",
        "unit/test_oci_images.py::test_what_this_machine_lacks_is_not_the_image_s_fault",
    ],
    "malformed task, bad attachment": [
        f"{FAULTS}::test_malformed_tasks_are_reported_and_the_run_goes_on",
        "unit/tasks/test_attachments.py::test_what_is_no_file_inside_the_folder_is_refused",
    ],
    "wall clock stepped, machine suspended": [
        f"{FAULTS}::test_steps_of_the_wall_clock_change_no_limit_and_no_duration"
    ],
    "orchestrator stopped (SIGSTOP, ^Z) or starved for over 20 s": [
        "unit/test_executor.py::test_standstill_of_our_own_is_nobodys_timeout",
        "unit/test_executor.py::test_what_is_late_after_a_standstill_is_nobody_s_timeout",
        "unit/test_pool.py::test_starts_in_which_this_process_stood_still_are_begun_again",
        "unit/test_clock.py::test_a_standstill_of_this_process_costs_the_sandbox_one_look_at_most",
        "unit/test_clock.py::test_standstill_is_noticed_and_a_busy_moment_is_none",
        "integration/test_grading_processes.py::test_a_standstill_of_this_process_costs_no_answer_its_score",
        "unit/scorers/test_judge.py::test_a_standstill_of_this_process_makes_no_answer_wrong",
    ],
    "scorer, judge or task source that cannot work": [
        f"{SCORERS}::test_a_scorer_that_cannot_work_costs_no_completion",
        f"{SCORERS}::test_a_judge_that_cannot_work_costs_no_completion",
        f"{SCORERS}::test_a_task_source_that_raises_is_named_with_its_line",
        "integration/test_grading_processes.py::test_a_scorer_that_fails_in_its_trial_is_named_with_its_error_and_its_line",
        "unit/scorers/test_judge.py::test_a_judge_without_a_verdict_in_its_trial_cannot_work",
    ],
    "scorer or judge fails on one answer": [
        "integration/test_grading_processes.py::test_an_answer_that_breaks_the_scorer_is_worth_nothing_and_is_not_drawn_again",
        "unit/scorers/test_judge.py::test_an_answer_at_which_the_judge_s_endpoint_fails_is_wrong_and_earns_no_other_try",
        "integration/test_grading_processes.py::test_a_service_that_comes_and_goes_makes_no_answer_wrong",
        "unit/scorers/test_judge.py::test_a_judge_that_comes_and_goes_makes_no_answer_wrong",
    ],
    "files that a rollout left do not come whole": [
        "unit/test_left_files.py::test_a_sandbox_that_somebody_removes_among_its_files_ends_its_rollout",
        "unit/test_left_files.py::test_a_standstill_among_files_ends_a_rollout_that_lacks_some",
        "unit/test_left_files.py::test_a_full_disk_is_no_policy_s_doing_and_a_name_that_it_does_not_take_is",
        "unit/cluster/test_crossing.py::test_a_node_that_is_lost_with_the_output_of_a_rollout_ends_that_rollout",
    ],
    "scorer or record broken": [
        "unit/test_executor.py::test_what_no_sandbox_can_help_is_not_retried",
        "unit/scorers/test_strategies.py::test_a_task_without_reference_answer_is_our_fault_and_no_reward",
    ],
}


def rows() -> dict[str, list[str]]:
    """Cells of the table of faults, by the fault."""
    table = "| fault |" + PAGE.read_text().partition("\n| fault |")[2].partition("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]
    return {fault: rest for fault, *rest in cells}


@cache
def functions_of(file: str) -> frozenset[str]:
    """Names of the test functions of a file."""
    tree = ast.parse((ROOT / "tests" / file).read_text())
    return frozenset(
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def test_every_row_has_its_tests_and_every_test_its_row() -> None:
    assert set(rows()) == set(ROWS)


@pytest.mark.parametrize("fault", ROWS)
def test_the_tests_of_a_row_are_there(fault: str) -> None:
    assert ROWS[fault]
    for test in ROWS[fault]:
        file, _, name = test.partition("::")
        assert name in functions_of(file), f"{fault}: there is no {test}"


def test_the_page_names_outcomes_that_exist_and_leaves_no_failure_out() -> None:
    outcomes = {str(name) for name in (*EndedName, *FailedName)}
    told = {name for what, outcome, *_ in rows().values() for name in re.findall(r"`(\w+)`", outcome)}
    assert told <= outcomes
    assert {str(name) for name in FailedName} <= told
