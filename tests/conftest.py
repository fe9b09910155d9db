"""What all tests share: the worlds of the session."""

from __future__ import annotations

import functools
import gc
import logging
import os
import re
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import settings
from mpi_worlds import WORLDS as MPI_WORLDS
from worlds import BACKENDS, SIZES_OF, World, Worlds, needs_linux

# A backend runs in the usual ones, or in those of `SIZES_OF`.
SIZES, USUAL = (1, 2, 3, 4, 5), (1, 2, 3, 5)

# Each of the hundreds of interpreters that tests start would compile the package anew, and pytest all tests.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    sys.dont_write_bytecode = False

# Collecting makes a million objects that stay. Until it is done, and from then on, nobody looks for garbage among them.
gc.disable()

# For the processes of pytest-xdist and whatever they start: they fill the processors by themselves, and threads of
# OpenBLAS that wait for each other in turns of the processors spin.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

settings.register_profile("tests", deadline=None, max_examples=50)  # a busy machine takes its time
settings.load_profile("tests")

# Folders and files whose tests take long: whole jobs, several hosts, MPI, random programs.
SLOW = (
    "bench",
    "benchmarks",
    "cluster",
    "conformance/test_array_kinds.py",
    "conformance/test_dry_calls.py",
    "conformance/test_floating_point_errors.py",
    "conformance/test_many_ranks.py",
    "core/test_command_lines.py",
    "core/test_init_automatic.py",
    "core/test_other_systems.py",
    "debug/test_stacks.py",
    "doctor",
    "examples",
    "faults/test_hang_reports.py",
    "faults/test_missing_ranks.py",
    "faults/test_resource_growth.py",
    "fuzz/test_calls.py",
    "fuzz/test_checkpoint_parsers.py",
    "fuzz/test_wrong_types.py",
    "launch/test_checkpoints_of_failing_ranks.py",
    "launch/test_elastic_nodes.py",
    "launch/test_error_files.py",
    "launch/test_job_status.py",
    "launch/test_meshrun_command.py",
    "launch/test_meshrun_failures.py",
    "launch/test_meshrun_signals.py",
    "launch/test_restarts_and_output.py",
    "launch/test_several_nodes.py",
    "launch/test_spawn.py",
    "launch/test_tls_jobs.py",
    "mpi",
    "network/test_wire_strangers.py",
    "reference_examples",
)
# Patterns of the names of tests that take seconds beside quick ones of the same thing.
SLOW_TESTS = re.compile(
    r"test_messages_over_2_gib\[gloo"
    r"|test_hang_attach.*::test_attach_(says_who|by_the_command_line)"
    r"|test_tuning.*::test_(all_ranks_choose_alike|all_ranks_begin_again|lists_of_unequal_arrays.*\[3|a_slow_way|the_next_group)"
    r"|test_tuning.*::test_(ranks_that_ask|what_ranks_measure_that_share_cores)"
    r"|test_arrays_of_cupy.*::test_random_programs_are_those_of_numpy"
    r"|test_show\.py::test_(text_fits.*\[(60|200)|dots_for)"
    r"|test_long_reductions_apart.*(\[(threads|gloo-tcp)|shared|-1\])"
    r"|test_send_circles.*::test_a_receive_from_any_of_two_waits.*\[threads"
    r"|test_messages_that_nobody_receives_do_not_keep_a_group_open\[True\]"
    r"|test_a_topology_is_one_or_refused"
    r"|test_ranks_of_two_hosts_exchange_long_blocks"
    r"|test_who_gave_up_and_left_still_counts_as_having_come"
    r"|test_300_silent_slow_and_half_open_strangers"
    r"|test_scans.*\[(threads|gloo)-[12]"
    r"|test_every_rank_(raises_the_circle_once_it_is_proven\[each.*|sees_the_circle_at_the_timeout\[)"
    r"|test_scans.*\[gloo-tcp"
    r"|test_another_group_name_at_one_file_is_told"
    r"|test_strangers_delay_nobody_and_are_hung_up_on_in_time"
    r"|test_without_tuning_the_guess_is_kept"
    r"|test_lines_of_ranks_that_log_at_once_do_not_run_together"
    r"|faults/test_(killed_ranks|interrupts_and_timeouts|ctrl_c_in_every_wait).*\[gloo-(hosts|tcp)"
    # Quick tests have the dtypes of ml_dtypes on these worlds, and large arrays, and NumPy's on the others.
    r"|conformance/test_(reductions|movement|gather_scatter).*\[(threads-2|gloo-2|gloo-tcp-3)-numpy"
    # Here, other dtypes, backends, transports or numbers of hosts are quick tests of the same.
    r"|test_scans.*::test_small_arrays\[gloo-3-numpy"
    r"|test_scans.*::test_small_arrays\[threads-3-numpy"
    r"|test_staged_devices.*::test_every_collective\[2"
    r"|test_thousands_in_flight\[gloo-tcp-3"
    r"|test_arrays_whose_elements_lie_apart\[(True|F)-(complex128|uint64)"
    r"|test_the_tags_of_the_messages_that_came_are_named\[(destroy-tcp|end-shared)"
    r"|test_the_end_of_a_child_is_not_that_of_the_rank\[tcp"
    r"|test_who_takes_of_any_rank_is_told_of_the_first.*-three hosts"
    r"|test_messages_during_the_first_collective\[gloo-tcp"
    r"|test_migration_programs.*::test_program_prints_what_the_page_says"  # as README's do
    # These wait for seconds.
    r"|test_last_records|test_exit_reports|test_an_interrupt_of_ranks_that_hang_shows_who_waits_for_whom"
    r"|test_the_others_wait_no_longer_than_they_are_told"
    r"|test_who_waited_for_a_stopped_rank_waits_again"
    r"|test_hang_timing.*::test_(of_those_that_begin_to_wait_at_once_one_warns|a_rank_that_was_told_nothing_finds_it_out)"
    r"|test_a_store_that_is_not_there_is_passed_over"
    r"|test_a_killed_host_is_replaced"
    r"|test_cell_magic.*::test_the_same_timeout_of_several_ranks"
    r"|test_init_refusals.*::test_(a_wrong_secret_is_told_to_those|a_stranger_does_not_end_the_wait)"
    r"|test_a_worker_that_does_not_hear_an_interrupt_is_killed"
    r"|test_attach_finds_how_the_last_wait_of_a_rank_ended"
    # Others are quick tests of the same.
    r"|test_strided_moves.*\[(9000|several chunks)\]"
    r"|test_lost_and_doubled_datagrams_do_no_harm\[2"
    r"|test_reductions_by_reading_are_the_same.*-3-core"
    r"|test_destroyed_groups_leave_no_memory_behind\[gloo\]"
    r"|conformance/.*\[threads-2"
    # Each waits for a second or two; on processes that share memory, or of another kind, it is a quick test.
    r"|faults/test_(awaited_i(sends|recvs)|cycles_beside_others|receives_from_anyone|send_circles|wait_any_cycles)"
    r".*[\[-]threads\]"
    r"|test_awaited_isends.*\[(as_a_batch|to_both_sides|two_to_each)-"
    r"|test_one_of_the_layouts_exchanges_nothing\[(.*-threads|(map|np).*-gloo)"
    r"|test_(deadlines_name_what_is_there|ranks_that_all_send_first_learn_what_to_call)\[(threads|gloo-tcp)"
    r"|test_a_deadlock_(of_an_exchange_is_explained_once|is_told_in_full_by_one_rank)\[(threads|gloo-tcp)"
    r"|test_messages_both_ways_that_nobody_receives_end.*\[(threads|gloo-tcp)"
    r"|test_a_rank_that_ends_early_with_status_0\[(_exit|destroys)"
    r"|test_store_resumption.*\[in the clear"
    r"|test_pages.*::test_program_prints_what_the_page_says"
    r"|faults/.*\[gloo-slots|faults/test_killed_ranks.*-first call\]"
    r"|test_arrays_live_until_the_call_is_done\[True"
    r"|test_cell_magic.*::test_(a_notebook_interrupts|figures_are_shown)"
    r"|test_nccl_(streams|failures).*::test_(the_host_waits_where|memory_that_a_call_in_a_graph|a_rank_that)"
    r"|test_nccl_collectives.*::test_(every_op|arrays_on_several_gpus_of_a_rank)\[(?!float32)"
    r"|faults/test_(rank_numbers|disagreements).*\[gloo-(tcp|hosts)"
    r"|conformance/test_(messages_that_do_not_fit|known_exchanges).*\[gloo-tcp"
    r"|conformance/(?!test_(movement|messages)).*\[gloo-tcp-3"
    r"|test_ctrl_c_in_every_wait.*-first call-|test_(moves|exchanges_of_changing_sizes).*-3-core and"
    r"|shared_arrays/.*\[gloo-slots|test_processes_lose_no_count"
    r"|faults/test_awaited_i(sends|recvs).py::test_every_rank_raises.*\[(in_a_ring|of_a_known_kind)-"
    r"|test_receives_from_anyone.*\[after_other_messages-|test_interrupts_and_timeouts.*-first call\]"
    r"|test_messages_that_do_not_fit.*\[gloo-.*-False\]|test_single_copies.*core and Python\]"
    r"|test_memory_of_calls.*\[[14]0000-gloo-hosts|test_however_each_rank_calls_all_count.*\[(1000-|40-3|3-3)"
    r"|tensor/.*::test_(few_programs\[[234]|few_samples_of_many_ranks\[[23])"
    r"|test_strided_messages.*::test_views_of_every_kind\[(threads-[12]|gloo-tcp)|test_many_in_flight\[threads-[34]"
    r"|test_reductions.*\[threads-3-numpy"
    r"|test_arrays_whose_elements_lie_apart\[True-(int16|bool|float32|bfloat16)"
    r"|test_drawings_are_shown_once_for_all_workers|test_wake_ups.*\[gloo-(long|of any)"
    r"|test_sums_of_floats_do_not_depend_on_where_they_lie\[1200001|test_ctrl_c_in_every_wait.*-to another"
    r"|test_second_derivatives.*\[3\]|test_blocks_become_rows_on_every_mesh_and_for_every_save\[.*zarr"
    r"|test_a_changed_byte_is_noticed_on_any_mesh\[(npy|zarr)|test_arrays_in_either_byte_order\[zarr"
    r"|conformance/test_(movement|gather_scatter|messages).*\[threads-3-numpy|test_messages\.py.*\[gloo-tcp-3-numpy"
    r"|test_mixed_receives.*\[4-gloo-hosts"
    r"|test_(sync_calls_right_after_wait|thousands_in_flight)\[threads-3"
    r"|test_dir_of_a_module_shows_its_api_alone\[(torch|dask|ray)|test_exchanges_of_changing_sizes.*\[(2-off|3)-"
    r"|test_moves_in_every_way.*-3-core\]"
    r"|test_lists_of_unequal_arrays_go_in_every_way\[1000-3|test_exit_without_destroy.*\[2-1"
    r"|test_circle_proof.*\[((1|2|18)-|0-Simulated)|test_arrays_on_several_gpus_of_a_rank\[float32-.*-3\]"
    r"|test_staged_devices.*::test_every_collective\[3"
    r"|test_a_pipeline_sends_gpu_arrays.*\[1F1B-standin|test_the_tags_of_the_messages_that_came_are_named\[end-tcp"
    r"|test_who_takes_of_any_rank_is_told_of_the_first.*\[raise-one host|test_messages_during_the_first.*\[gloo-hosts"
    r"|test_calls_go_on_over_connections_that_were_reset\[\([01],\)|test_reduce_to_every_index_of_the_slice\[2x2x2"
    r"|test_wrong_files_are_refused.*asks for 270000"
    # These take seconds; the first is what CI begins with.
    r"|test_the_job_prints_what_the_readme_says|test_missing_features.*::test_it_works_all_the_same"
    r"|test_every_call_twice|test_long_reductions_apart.*::test_the_input_is_not_changed|test_shared_calls.*::test_four_ranks"
    r"|test_all_texts_of_a_plot_can_be_read|test_there_is_more_space_between_the_grids|test_profiling_page"
    r"|test_other_workers_take_the_place_of_those_before|test_asking_for_any_name_raises_nothing_else"
    r"|test_any_departure_survives_the_way|test_no_slot_is_written_before_it_is_read"
)
# Patterns of the names of slow tests that repeat others, in more worlds, with more libraries or more versions.
EXHAUSTIVE = re.compile(
    r"conformance/.*\[threads-2\b|conformance/.*\[((threads|gloo|gloo-slots)-5|gloo-slots-[12]|mpi-mpich)\b"
    r"|conformance/(?!test_(reductions|movement|messages)).*\[mpi-"
    r"|test_same_as_torch.*-(threads|gloo-slots|gloo-tcp)\]|test_benchmarks.*\[(mpich|torch)\]"
    r"|test_benchmarks.*::test_(between_hosts|the_start_on_two|cost_model_is|mesh_start)"
    r"|test_benchmarks.*::test_(a_library_that_is_missing|backend_mpi_is|sizes_that_ranks|several_numbers)"
    r"|test_package.*\[1[23]\]|test_benchmarks.*::test_(soak_finds_no_wrong_value|faults_are_noticed)\[(tcp|hosts)"
    r"|test_launch_examples.*::test_(a_spawn_on_each_node|spawns_with_secrets_of_their_own.*)\[tcp"
    r"|test_train_digits.*\[float32|tests/tensor/(?!test_random_programs)|test_same_as_gloo.*-3\]"
    r"|test_benchmarks.*::(test_arrays_are_compared|test_data_parallel_training|test_compare_measures_every_collective\[openmpi)"
    r"|test_classic_script_prints_the_same_with_torch_arrays|ray_backend/(?!test_ray_jobs)|test_libraries"
    r"|conformance/(?!test_(reductions|movement|messages|groups)).*\[gloo-hosts"
    r"|conformance/test_(movement|messages).*\[mpi-"
    r"|test_same_as_torch.*\[programs_reductions.(reduce|reduce_scatter)-"
    r"|test_dask_jobs.*::test_a_stuck_worker_is_left_out.*\[1-True|test_backends_of_torch_are_compared"
    r"|test_bad_networks|test_large_html_and_plots|conformance/(?!test_(reductions|messages)).*\[gloo-slots-3"
    r"|test_same_as_torch.*\[programs_movement"
    r"|test_benchmarks.*::test_(training_compares|startup_times|the_same_meshes|soak_finds|soak_over|scaling|mesh_scale)"
    r"|test_package.*::test_a_wheel_with_the_core_is_for_this_platform|test_two_hosts.*::test_cut_cable"
    r"|test_no_slot_is_written_before_it_is_read\[((even|none)-4|all-2|\w+-5)"
    r"|test_every_collective_with_threads\[in_place0-4|test_classic_script_prints_the_same_under_torch"
    r"|test_torch_between_hosts|test_worlds_harness.*::test_any_directories|test_mpi_jobs.*\[mpich\b"
    r"|test_every_collective_with_threads\[(in_place0-[13]|in_place1-4)\]"
    r"|test_reductions.*(\[gloo-hosts|::test_reduce_scatter\[mpi-)|test_messages_over_2_gib\[gloo"
    r"|test_many_groups.*\[mpi-mpich|fuzz/test_calls.*\[(2-gloo|3-(gloo-slots|gloo-hosts|threads))"
    r"|test_mpi_jobs.*::test_under_meshrun.*-((script-after|module-before) MPI|script-before MPI.*too early'\))"
    r"|test_mpi_jobs.*::test_under_meshrun.*too early'\)-module|test_scans.*::test_small_arrays\[gloo-tcp-3-numpy"
    r"|reference_examples/(?!test_debug).*\[(.*-)?[23](-ranks.*)?\]|test_debug_examples.*\[[24](-ranks.*)?\]"
    r"|test_everything_between_two_hosts\[\(1, 2\)\]|test_dtypes_and_ops\[(?!float16|bfloat16|complex64|bool)"
    r"|test_300_strangers_that_begin_tls_and_are_silent_delay_nobody"
    r"|test_faulty_links.*::test_calls_on_a_link_that_reorders_and_loses_packets|faults/.*\[gloo-slots"
    r"|faults/(?!test_(resource_growth|ctrl_c|rank_numbers|disagreements)).*\bgloo-tcp(?!.*-connected)"
    r"|test_train_digits.*\[float64-(2x1|1x2|4x1|1x4)"
    r"|test_every_mesh_computes_the_run_of_one_rank\[(2x1x1-\]|1x2x1-\]|1x2x2-\]|2x2x1---zero)"
    r"|test_reductions.*::test_(?!(all_reduce|reduce|reduce_scatter_tensor|undefined_\w+)\[)\w+\[mpi-"
    r"|test_torchrun_starts_the_same_program\[standalone(0-variables1|1-variables0)"
    r"|faults/test_(awaited_i(sends|recvs)|cycles_beside_others|receives_from_anyone).*[\[-]threads\]"
    r"|test_awaited_isends.*::test_who_leaves_the_wait_by_ctrl_c.*\[gloo\]"
    r"|test_awaited_irecvs.*::test_who_leaves_the_wait_by_ctrl_c.*\[gloo-hosts\]"
    r"|test_ctrl_c_on_a_job_that_hangs_names_the_absent_rank_alone\[(openmpi-gloo|mpich-mpi)"
    r"|test_mpi_jobs.*::test_ranks_that_name_.*-False|test_every_collective_with_threads\[in_place1-1\]"
    r"|test_the_mesh_may_have_any_sides\[6-|test_ranks_die_with_their_parent\[forkserver"
    r"|test_program_that_ends_without_join\[False|test_no_slot_is_written_before_it_is_read\[all-4"
    r"|test_reductions.*::test_(reduce_scatter|all_reduce|reduce)\[gloo-slots-3"
    r"|test_launch_examples.*::test_a_wrong_secret_on_one_node_is_an_error.*\[missing on the first"
    r"|conformance/.*\[gloo-1\b|test_500_groups_that_are_all_kept\[gloo\]"
    r"|test_what_ranks_measure_that_share_cores_with_others|test_float32_stays_near_the_run_of_one_rank"
    r"|test_awaited_i(sends|recvs).*::test_as_long_as"
    r"|faults/test_(awaited_isends|cycles_beside_others|receives_from_anyone|wait_any_cycles|send_circles).*\bgloo-hosts\]"
    r"|test_wait_any_cycles.*::test_as_long_as.*\[threads|faults/test_(ctrl_c_in_every_wait|exit_reports.*-unmet)"
    r"|faults/test_(rank_numbers|disagreements|interrupts_and_timeouts|call_positions).*\bgloo-tcp-"
    r"|test_many_ranks.*\[gloo-slots|test_no_slot_is_written_before_it_is_read\[even-2"
    r"|test_notebooks.*\[(transformer|numpy_on_four_ranks)|test_torchrun_starts_the_same_program\[standalone1"
    r"|test_training_gives_the_losses_of_gloo|test_measuring_collectives.*::test_shared_arrays"
    r"|test_300_silent_slow_and_half_open|test_lines_of_ranks_that_log_at_once|test_plan_at_8192_ranks"
    r"|test_a_worker_that_does_not_hear_an_interrupt|test_a_rank_that_is_ended_is_no_failure_whatever_its_clock"
    r"|test_a_launcher_starts_the_script|test_dtypes_and_ops\[(complex64|bool)"
    r"|test_messages_that_do_not_fit.*\[gloo-(tcp|.*-False\])"
    r"|conformance/test_(reductions|movement|gather_scatter).*\[(gloo-hosts-4|gloo-tcp-3)-numpy"
    r"|core/.*\[.*mpi-openmpi"
    r"|test_calls_whose_shapes_never_repeat.*\[4-gloo-hosts"
    r"|test_reset_links.*\[in the clear|test_same_as_torch.*\[programs_reductions.reduce_scatter_tensor-"
    r"|test_all_texts_of_a_plot_can_be_read\[shape[0-24]|test_zarr_metadata_are_read_or_refused"
    r"|test_dask_jobs.*::test_a_stuck_worker_is_left_out|test_launched_script_works_with_each_library\[openmpi"
    r"|test_random_programs_have_the_gradients_of_one_process\[12"
    r"|test_a_traceback_ends_at_the_call\[(?!load\])|test_launch_examples.*\[file:|test_mpi_passing.*\[mpi-mpich"
    r"|test_under_a_launcher_the_first_rank_alone.*\[options[12]|test_64_ranks_that_are_stuck"
    r"|test_a_traceback_ends_at_the_line_of_the_user\[(keyword of|async|between)"
    r"|test_the_core_is_compiled_by_every_python|test_notebooks.*\[(choosing_a_mesh|pipelines)"
    r"|test_it_agrees_with_one_process\[(kmeans|nbody|fft_pencils|matmul|heat_2d_arrays)"
    r"|test_several_nodes.*::test_(killed_launcher|signal_to_one_launcher)_ends_all_hosts.*\[1\]"
    r"|test_launch_examples.*::test_(spawn\[tcp|a_wrong_secret_on_one_node.*\[different)"
    r"|test_spawn\.py.*\[forkserver|test_meshrun_signals.*::test_ctrl_c_on_a_job_that_hangs.*\[1\.0"
    r"|test_(destroyed_groups_leave_no_memory|50_worlds).*\[gloo-tcp|test_many_ranks.*\[gloo-tcp"
    r"|fuzz/test_calls.*\[(2-threads|3-gloo-tcp)"
    r"|test_a_save_that_fails_at_the_end.*\[(?!\])|test_a_missing_destroy_is_told.*\[(?!-True)"
    r"|test_ctrl_c_on_a_job_that_hangs_names_the_absent_rank_alone\[mpich|test_plot\[\.svg"
    r"|test_train_transformer.*\[(1x1x2|2x1x2)|test_everything_between_two_hosts\[\(1, 1\)"
    r"|test_thousands_in_flight\[threads-3|test_a_save_in_progress.*\[(raise.*-True|sys.*rank == 1)"
    r"|test_sigterm_on_a_job_that_hangs.*\[True|test_mpi_jobs.*::test_under_meshrun.*-sys\.exit.*-script"
    r"|test_an_exception_comes_first\[sys|test_(accounting|subgroups|flight_recorder).*\[mpi-"
    r"|test_reductions.*::test_(reduce|reduce_scatter|reduce_scatter_tensor)\[threads-3-numpy"
    r"|test_reductions.*::test_reduce\[mpi-"
)
# Folders whose slow tests stand beside quick ones. Of the sets of parameters of each test, CI runs the first for each
# backend; the others are exhaustive as well.
SAMPLED = (
    "autograd",
    "checkpoint",
    "compiled",
    "conformance",
    "core",
    "debug",
    "devices",
    "faults",
    "fuzz",
    "network",
    "parallel",
    "profiler",
    "shared_arrays",
    "store",
    "tensor",
)
_BACKEND = re.compile(r"[\[-](threads|gloo(?:-(?:slots|tcp|hosts))?|mpi-\w+)\b")
# Files whose few tests take long. They begin first, so that no process has one to run when the others are done.
FIRST = (
    "ray_backend/test_ray_jobs.py",
    "docs/test_site.py",
    "tensor/test_random_programs.py",
    "docs/test_notebooks.py",
    "launch/test_elastic_nodes.py",
    "package/test_package.py",
    "cluster/test_reset_links.py",
    "cluster/test_gloo_between_hosts.py",
    "faults/test_hang_reports.py",
    "docs/test_migration_programs.py",
    "cluster/test_two_hosts.py",
    "torch_backend/test_torch_suite.py",
    "torch_backend/test_worlds_and_meshes.py",
    "core/test_tuning.py",
    "examples/test_elastic_training.py",
    "cluster/test_lost_store.py",
    "compiled/test_sanitizers.py",
)
_TESTS = Path(__file__).parent
_IN_SLOW_PLACE = re.compile(f"(?:{'|'.join(map(re.escape, SLOW))})(?:/|$)")


@functools.cache  # a process asks for 13,000 tests, which are in 350 files
def _is_in_slow_place(path: Path) -> bool:
    return path.is_relative_to(_TESTS) and _IN_SLOW_PLACE.match(path.relative_to(_TESTS).as_posix()) is not None


def pytest_configure(config: pytest.Config) -> None:
    # The order is that of `pytest_collection_modifyitems`; otherwise pytest-xdist takes the number of tests alone.
    config.option.loadscopereorder = False


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    sampled = set()
    for item in items:
        runs_mpi = "mpi-openmpi" in item.name or "mpi-mpich" in item.name  # ranks of MPI spin
        if runs_mpi or _is_in_slow_place(item.path) or SLOW_TESTS.search(item.nodeid):
            item.add_marker("slow")
        if {"torch", "torch_worlds"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("torch")
        marks = {mark.name for mark in item.iter_markers()}
        if "exhaustive" in marks or marks.isdisjoint({"slow", "torch"}):
            continue
        is_exhaustive = EXHAUSTIVE.search(item.nodeid)
        if not is_exhaustive and item.path.relative_to(_TESTS).parts[0] in SAMPLED:
            test = item.nodeid.partition("[")[0]
            backend = _BACKEND.search(item.nodeid, len(test))
            sample = test, backend and backend[1]
            is_exhaustive = sample in sampled
            sampled.add(sample)
        if is_exhaustive:
            item.add_marker("exhaustive")
    yield
    if hasattr(config, "workerinput"):  # several processes, each of which takes a file at a time
        num_tests = Counter(item.path for item in items)
        first = {_TESTS / name: place for place, name in enumerate(FIRST)}
        items.sort(key=lambda item: (first.get(item.path, len(first)), -num_tests[item.path]))


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _own_choices(tmp_path_factory: pytest.TempPathFactory) -> None:
    # What tests measure is not remembered for the user, nor for the next run.
    os.environ["MESHDIST_CACHE_DIR"] = str(tmp_path_factory.mktemp("choices"))


@pytest.fixture(autouse=True)
def _debug_level_stays() -> Iterator[None]:
    # A level that a test sets holds for the process, and comes before that of the environment.
    logger = logging.getLogger("meshdist")
    level, handlers = logger.level, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Make stdout a terminal of so many columns."""

    def of(columns: int) -> None:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)

    return of


@pytest.fixture
def torch() -> ModuleType:
    """The package; a test that asks for it is skipped where it is not installed."""
    return pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    worlds = Worlds()
    yield worlds
    worlds.close()


def _param(backend: str, size: int) -> object:
    marks = [] if backend == "threads" else [needs_linux]
    if _is_slow(backend, size):
        marks.append(pytest.mark.slow)
    return pytest.param((backend, size), id=f"{backend}-{size}", marks=marks)


def _is_slow(backend: str, size: int) -> bool:
    # On two processors, larger worlds take most of the time. A world of one shows the same on threads.
    return backend == "gloo-slots" or size > 3 or (backend, size) == ("gloo", 1)


def _params(sizes: tuple[int, ...]) -> list[object]:
    ours = [_param(backend, size) for backend in BACKENDS for size in sizes if size in SIZES_OF.get(backend, USUAL)]
    return ours + [_param(backend, size) for backend, size in MPI_WORLDS if size in sizes]


@pytest.fixture(params=_params(SIZES))
def world(request: pytest.FixtureRequest, worlds: Worlds) -> World:
    """A world of each backend, each way that gloo moves data, and each size."""
    return worlds.world(*request.param)


@pytest.fixture(params=_params(SIZES[1:]))
def world_of_several(request: pytest.FixtureRequest, worlds: Worlds) -> World:
    """A world of each kind that has somebody to send to."""
    return worlds.world(*request.param)


@pytest.fixture(params=_params((3,)))
def world_of_3(request: pytest.FixtureRequest, worlds: Worlds) -> World:
    """A world of three ranks, of each backend and each way that gloo moves data."""
    return worlds.world(*request.param)


@pytest.fixture
def port() -> Iterator[int]:
    """A port of 127.0.0.1 on which nobody listens, and that nobody else is given meanwhile."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the test itself may listen on it
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]
