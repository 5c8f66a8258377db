"""What the driver's process does: connects Ray, starts and restarts the workers, shows and keeps what they report.

Parts of Ray that it does not promise, for which `pyproject.toml` pins it to the version that is tested:

    launch.py        TorchTrainer's `_create_default_callbacks`, `_initialize_and_run_controller`: policies of our own
    failures.py      FailurePolicy: waits for room without an end, failed starts are counted in a row
    elastic.py       the actor AutoscalingCoordinator: a new node counts at once, a killed driver's request is freed;
                     `get_draining_nodes` (the public question is a barrier of all workers), an elastic policy's count
    local_group.py   TrainController, WorkerGroup: a run on this machine alone starts with fewer processes
    local_ray.py     (in `rayrec/_runtime`) Node: a local Ray starts without the processes that look after a cluster
    ray_reader.py    (in `data/stream`) `available_resources_per_node`, and quiet progress bars
"""
