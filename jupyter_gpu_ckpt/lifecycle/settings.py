"""The settings of a kernel's lifecycle; the provisioner fills them from its traits."""

from __future__ import annotations

from dataclasses import dataclass

#: Environment variables that are stale after a restore: credentials of the server, and the job it runs in.
REFRESHED = ("JUPYTERHUB_API_TOKEN", "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_STEP_ID")


@dataclass(frozen=True)
class LifecycleSettings:
    """Deadlines in seconds, and choices."""

    drain: float = 10.0
    agent: float = 60.0
    cuda: float = 30.0
    connect: float = 20.0
    #: CRIU and the CUDA driver get ``base`` plus the time the bytes take at this rate (bytes per second).
    base: float = 60.0
    slowest_rate: float = 50e6
    #: How long a wake waits for another kernel that is being restored to the same GPU.
    reservation: float = 30.0
    #: How long a dump waits for pipes that other processes of the user have.
    pipes: float = 30.0
    #: How long a wake waits for ports on which closed connections linger: Linux needs 60 s.
    lingering: float = 65.0
    #: Environment variables that a restored kernel gets anew from the server.
    refresh: tuple[str, ...] = REFRESHED
    #: Whether files that changed while a kernel was checkpointed are accepted as they are now.
    accept_changed_files: bool = False
    #: Whether a kernel that Landlock confines may be checkpointed, and be restored without that confinement.
    allow_unconfined_wake: bool = False
    #: Bytes of files that are copied for a save point, where the file system has no reflinks: the kernel waits for it.
    kept_file_bytes: int = 256 << 20
    kept_code_bytes: int = 4 << 30
    #: Automatic save points of a kernel that are kept (`save_point.thinned`).
    automatic_save_points: int = 5
    #: How long a user has to answer whether changed files are accepted.
    question: float = 120.0
    #: URL of the cold tier, which has the content of old images.
    archive_url: str = ""
    #: Whether the CUDA context of a suspended kernel stays on the GPU, where its allocations can be swapped out alone.
    warm: bool = False
    #: Bytes of host memory that may have a copy of the device memory of a kernel that runs; 0: none is kept, None: as
    #: many as host memory allows (`host_copies`).
    host_copy_bytes: int | None = None
    #: Whether chunks of the last image are kept while the kernel runs, so that the next one is written faster.
    keep_chunks: bool = True
    #: Whether kernels share GPUs with those of others: "off", their memory ("room"), or also in turns ("turns").
    sharing: str = "off"
    #: Whether a suspended kernel's device memory is written to the disk before a checkpoint is requested.
    write_ahead: bool = True
