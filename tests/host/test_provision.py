"""A fresh machine is provisioned, from nothing to a container that sees the GPU; a second time nothing changes."""

from tests.host.fake_gpu import UUID
from tests.host.conftest import give_image, TINY_IMAGE

def test_a(fresh, front):
    said = front("provision", fresh, "--check")
    print(said)
    said = front("provision", fresh)
    print(said.code, said.host["problem"], said.host["changed"], said.duration_s)
    assert said.code == 0, said.host["problem"]
    give_image(fresh)
    print(fresh.run("docker","run","--rm","--network=none",f"--device=nvidia.com/gpu={UUID}","--entrypoint=nvidia-smi",TINY_IMAGE,"-L",check=False))
    print(fresh.run("docker","run","--rm","--network=none","--device=nvidia.com/gpu=GPU-no","--entrypoint=nvidia-smi",TINY_IMAGE,"-L",check=False))
    said = front("provision", fresh)
    print(said.code, said.host["problem"], said.host["changed"], said.duration_s)
    said = front("doctor", fresh)
    print([f for f in said.host["findings"] if f["ok"] is not True], said.duration_s)
    print(fresh.run("sh","-c","cat /etc/docker/daemon.json; ls /etc/docker /etc/cdi /var/run/cdi /root/.ansible /root/.ansible/tmp; cat /etc/apt/sources.list.d/nvidia*", check=False))
