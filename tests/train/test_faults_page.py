"""Pages about faults are true line by line: the tests that show each of their rows."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# what happens, as the page has it, and the tests in which it happens
SHOWN = {
    "a worker or its node dies": [
        "train/test_ray.py::test_a_killed_worker_is_replaced_and_the_run_ends_as_if_nothing_had_happened",
        "train/test_chaos.py::test_a_run_that_meets_every_fault_ends_as_if_nothing_had_happened",
    ],
    "Ray announces that a node will leave": [
        "train/test_pretended_ray.py::test_a_node_that_ray_takes_away_is_left_at_once",
        "train/test_chaos.py::test_a_run_that_meets_every_fault_ends_as_if_nothing_had_happened",
    ],
    "the cluster is too small at the start": [
        "train/test_pretended_ray.py::test_a_cluster_that_may_grow_is_asked_to_until_it_has",
        "train/test_pretended_ray.py::test_runs_that_wait_do_not_withdraw_each_others_requests",
        "train/test_pretended_ray.py::test_more_than_a_cluster_of_fixed_size_has_is_refused",
        "train/test_pretended_ray.py::test_a_run_without_room_is_refused_in_time",
    ],
    "the cluster no longer has room for all workers": [
        "hosts/test_cluster.py::test_a_host_is_cut_off_and_the_run_goes_on_then_grows",
        "train/test_chaos.py::test_a_run_that_lost_a_node_waits_until_another_comes_or_its_limit",
        "train/test_ray_internals.py::test_an_elastic_run_is_as_large_as_the_nodes_that_are_alive_when_it_restarts",
        "train/test_month.py::test_waits_are_not_counted_and_failed_starts_are_in_a_row",
    ],
    "nodes do not see the same `storage.path`": [
        "checkpoint/test_shared_folder.py::test_ranks_on_other_disks_are_named_on_every_rank",
        "train/test_resources.py::test_nodes_that_do_not_see_the_run_folder_are_named_before_workers_start",
        "checkpoint/test_shared_folder.py::test_the_driver_sees_another_folder",
        "checkpoint/test_shared_folder.py::test_a_save_does_not_wait_forever_for_files_that_went_elsewhere",
    ],
    "the rows of `data.eval`, `data.eval_sets` or `data.test` cannot be read or scored": [
        "train/test_evaluation_check.py::test_a_broken_set_ends_the_run_on_every_rank_before_the_first_step",
        "train/test_evaluation_check.py::test_an_empty_test_set_is_refused_but_not_an_empty_named_set",
    ],
    "a background evaluation fails: its process is killed, or its checkpoint is damaged": [
        "train/test_background_evaluation.py::test_a_killed_evaluator_is_replaced_and_given_up_after_the_third",
        "train/test_background_evaluation.py::test_a_damaged_and_a_removed_checkpoint_are_named",
    ],
    "the run ends before its background evaluations": [
        "train/test_background_evaluation.py::test_a_run_that_ends_before_its_evaluations_says_which_are_missing",
    ],
    "a tracker or another callback does not answer": [
        "train/test_callbacks.py::test_a_callback_that_does_not_return_holds_nothing_up",
    ],
    "the command is started again": [
        "train/test_ray.py::test_a_run_goes_on_with_other_numbers_of_workers_after_its_model_failed",
        "train/test_fit.py::test_an_interrupted_run_goes_on_where_it_was",
    ],
    "the command is started a second time, on this machine or another": [
        "train/test_run_folder.py::test_one_run_at_a_time",
        "train/test_outages.py::test_a_second_launch_is_refused_where_locks_do_not_reach",
        "checkpoint/test_launch.py::test_a_launch_of_another_machine_is_known_by_its_beat",
        "checkpoint/test_launch.py::test_a_launch_without_a_beat_is_over",
        "checkpoint/test_launch.py::test_a_launch_whose_clock_is_31_minutes_behind_is_alive",
    ],
    "another launch took over the run nevertheless": [
        "train/test_outages.py::test_a_launch_that_was_taken_over_ends_and_says_by_whom",
    ],
    "SIGTERM, Ctrl-C or a closed terminal": [
        "train/test_signals.py::test_a_stop_ends_the_run_whole_and_leaves_nothing_running",
        "train/test_signals.py::test_a_second_ctrl_c_ends_the_command_and_its_ray",
        "train/test_console_faults.py::test_ctrl_c_with_tee_beside_takes_a_last_checkpoint",
        "train/test_stop_signals.py::test_a_closed_terminal_asks_once_however_often_it_is_heard",
        "train/test_stop_signals.py::test_a_hangup_is_heard_unless_it_is_ignored_as_under_nohup",
    ],
    "`rayrec stop RUN`, in another terminal or on another machine": [
        "cli/test_stop_resume.py::test_a_run_stops_at_a_request_and_resumes_from_its_folder",
        "checkpoint/test_launch.py::test_a_launch_is_asked_to_stop_and_the_next_one_is_not",
    ],
    "the driver is killed": [
        "train/test_run_folder.py::test_lines_that_a_killed_driver_did_not_copy_are_kept",
        "checkpoint/test_parts.py::test_a_manifest_that_is_not_listed_yet_keeps_its_checkpoint",
    ],
    "one worker fails, others wait": [
        "train/test_lockstep.py::test_an_error_of_one_rank_ends_all_with_its_text",
        "train/test_lockstep.py::test_only_what_may_end_otherwise_is_tried_again",
        "train/test_ray.py::test_a_lost_worker_counts_more_than_errors_of_the_others",
    ],
    "a GPU or its driver fails": [
        "train/test_lockstep.py::test_only_what_may_end_otherwise_is_tried_again",
        "train/test_ray.py::test_failures_beyond_the_limit_end_the_run_with_how_often_and_why",
        "train/test_failed_nodes.py::test_workers_restart_without_the_node",
    ],
    "a model makes an exchange on one rank only": [
        "train/test_watch.py::test_ranks_that_wait_for_each_other_at_unlike_places_end_with_the_places",
        "train/test_watch.py::test_unlike_places_are_told_when_they_are_seen_twice",
        "train/test_pretended_ray.py::test_what_a_worker_said_before_it_ended_itself_is_the_reason",
    ],
    "a worker does not move at all": [
        "train/test_watch.py::test_a_rank_that_does_not_move_tells_its_stacks_and_ends",
        "train/test_ray.py::test_the_only_worker_is_replaced_where_it_is_frozen",
    ],
    "the loss or a dense parameter is not finite": [
        "train/test_fit.py::test_a_loss_that_is_not_finite_ends_the_run_before_a_checkpoint_has_it",
        "train/test_guards.py::test_parameters_that_are_not_finite_never_reach_a_checkpoint",
        "train/test_guards.py::test_training_goes_back_with_half_the_learning_rate_where_it_may",
    ],
    "the storage of checkpoints is unavailable during training": [
        "train/test_outages.py::test_a_checkpoint_that_fails_costs_only_itself",
        "checkpoint/test_parts.py::test_a_save_is_timed_and_told_once",
    ],
    "the storage of checkpoints is unavailable at a start, after a loss or for the last checkpoint": [
        "train/test_outages.py::test_a_start_waits_for_its_storage",
        "train/test_outages.py::test_the_last_checkpoint_waits_for_its_storage",
        "train/test_outages.py::test_a_wait_for_storage_ends",
        "checkpoint/test_saving.py::test_a_store_that_takes_nothing_is_given_up_and_one_that_is_slow_is_not",
    ],
    "a checkpoint is removed while a command reads it": [
        "checkpoint/test_saving.py::test_what_is_removed_while_it_is_read_is_not_damaged",
    ],
    "a checkpoint is damaged": [
        "train/test_choice.py::test_each_command_refuses_damage_unless_an_older_checkpoint_is_asked_for",
        "train/test_choice.py::test_training_alone_goes_on_from_an_older_one_and_says_so",
    ],
    "an increment (`storage.increments`) cannot be written": [
        "checkpoint/test_increments.py::test_a_failed_increment_leaves_its_changes_to_the_next_one",
    ],
    "an increment is damaged or missing": [
        "checkpoint/test_increments.py::test_a_gap_and_damage_are_named_and_the_longest_good_chain_loads",
        "train/test_checkpoints.py::test_a_run_goes_on_from_the_newest_increment_that_needs_no_damaged_one",
        "dynamic_ids/test_training.py::test_a_killed_run_goes_on_from_its_increments_bit_for_bit",
    ],
    "the run has trained on wrong data": [
        "inference/test_delta.py::test_a_run_is_rewound_to_a_time",
    ],
    "metrics, plan or report cannot be written": [
        "train/test_driver.py::test_lines_stay_whole_where_the_disk_is_full_or_a_driver_was_killed",
    ],
    "the console fails": [
        "train/test_console_faults.py::test_a_run_whose_console_is_gone_is_trained_to_its_end",
        "train/test_console_faults.py::test_a_terminal_that_is_not_utf8_shows_what_it_can",
    ],
}


def rows_of(page: str) -> list[list[str]]:
    """The cells of the first table of a page, below its head."""
    lines = re.findall(r"^\| (.+) \|$", (ROOT / page).read_text(encoding="utf-8"), flags=re.M)
    return [line.split(" | ") for line in lines[1:]]


def assert_there(tests: Iterable[str]) -> None:
    """`file::test`, below tests/."""
    for name in tests:
        file, test = name.split("::")
        assert re.search(rf"^def {test}\(", (ROOT / "tests" / file).read_text(encoding="utf-8"), re.M), name


def test_each_row_of_the_page_is_shown_by_tests() -> None:
    happens = [re.sub(r" \(.*\)$", "", row[0]) for row in rows_of("rayrec/train/FAULTS.md")]
    assert happens == list(SHOWN)
    for names in SHOWN.values():
        assert_there(names)


@pytest.mark.parametrize("page", ["rayrec/data/SAFETY.md", "deploy/SAFETY.md"])
def test_each_row_names_tests_that_are_there(page: str) -> None:
    rows = rows_of(page)
    assert len(rows) > 10
    for what, _, tests in rows:
        names = re.findall(r"`([^`]+)`", tests)
        assert names, what
        assert_there(names)
