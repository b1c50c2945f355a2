"""jupyterhub_config.py of the hub on the head of a Slurm cluster (`slurm_hub`), which fills in the environment."""

import os
from pathlib import Path

from batchspawner import SlurmSpawner

from jupyter_gpu_ckpt.hub.placement import Placement
from jupyter_gpu_ckpt.hub.spawn_messages import SpawnMessagesMixin
from jupyter_gpu_ckpt.hub.spawner import CheckpointMixin

bin_directory = Path(os.environ["TEST_BIN"])
place = Path(os.environ["TEST_PLACE"])

c = get_config()  # noqa: F821
c.JupyterHub.bind_url = f"http://{os.environ['TEST_ADDRESS']}:8000"
c.JupyterHub.hub_bind_url = f"http://{os.environ['TEST_ADDRESS']}:8081"
c.JupyterHub.db_url = f"sqlite:///{place}/hub.sqlite"
c.JupyterHub.cookie_secret_file = f"{place}/cookie_secret"
c.ConfigurableHTTPProxy.command = [os.environ["TEST_PROXY"]]
c.ConfigurableHTTPProxy.pid_file = f"{place}/proxy.pid"
c.JupyterHub.tornado_settings = {"slow_spawn_timeout": 0}  # or a start of some seconds has no spawn page
c.JupyterHub.authenticator_class = "dummy"
c.Authenticator.allow_all = True
c.JupyterHub.services = [{"name": "test", "api_token": os.environ["TEST_TOKEN"]}]
c.JupyterHub.load_roles = [
    {"name": "test", "services": ["test"], "scopes": ["admin:users", "admin:servers", "access:servers"]}
]


class Spawner(CheckpointMixin, SpawnMessagesMixin, SlurmSpawner):
    """Slurm's, whose servers are drained before their jobs end, with what the placement has to say."""


c.JupyterHub.spawner_class = Spawner
c.SlurmSpawner.batchspawner_singleuser_cmd = str(bin_directory / "batchspawner-singleuser")
c.SlurmSpawner.req_gres = "gpu:1"
c.Spawner.poll_interval = 2
c.Spawner.cmd = [str(bin_directory / "jupyterhub-singleuser")]
c.Spawner.environment = {
    "XDG_RUNTIME_DIR": os.environ["TEST_RUNTIME"],
    "JUPYTER_GPU_CKPT_CRIU": os.environ["TEST_CRIU"],
    "JUPYTER_CONFIG_PATH": f"{place}/etc",
}
c.Spawner.default_url = "/lab"
if os.environ.get("TEST_PLACEMENT"):
    c.Spawner.pre_spawn_hook = Placement(published=f"{place}/placement/{{username}}", without_gpu={"req_gres": ""})
