"""Runs of one machine in odd networks: names that do not resolve, a VPN, no network at all.

Each runs in namespaces of its own (`unshare`), with a host name, hosts file and interfaces of its
own, so nothing of this machine is touched and nothing is left when the command ends.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_NEEDED = ("unshare", "ip", "mount", "hostname")
_LACKING = [name for name in _NEEDED if shutil.which(name) is None]


def _why_not() -> str:
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    if _LACKING:
        return f"not installed: {', '.join(_LACKING)}"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "ip", "link", "add", "a0", "type", "veth"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode else ""


_REASON = _why_not()
pytestmark = [pytest.mark.cluster, pytest.mark.skipif(bool(_REASON), reason=_REASON)]

TESTS = Path(__file__).parent.parent
LIMIT_S = 120
DDP2 = "parallel=ddp num_devices=2 steps=20"
# A VPN: the way to everywhere, through an interface behind which nobody answers.
VPN = (
    "ip link add vpn0 type veth peer name far0 && ip link set far0 up && ip link set vpn0 up"
    " && ip address add 10.99.0.2/24 dev vpn0 && ip route add default dev vpn0"
)
LO = "ip link set lo up"
# Datagrams that this network has sent so far, those to a name server among them.
SENT = "awk '/^Udp: [0-9]/ {print \"datagrams\", $5}' /proc/net/snmp"


def inside(
    work: Path, *script: str, name: str = "gone.invalid", hosts: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a shell script on a machine of its own.

    Args:
        name: of the host; `hosts` says to what names resolve, and a server that never answers
            (where there is a way to it) is asked about all others.
    """
    # The second: torch's store asks for the name of its peer's address, in this form.
    known = f"127.0.0.1 localhost\n::ffff:127.0.0.1 localhost\n{hosts}\n"
    (work / "hosts").write_text(known, encoding="utf-8")
    (work / "resolv.conf").write_text("nameserver 10.99.0.53\n", encoding="utf-8")
    lines = (
        "set -e",
        "mount --make-rprivate /",
        f"hostname {name}",
        f"mount --bind {work}/hosts /etc/hosts",
        f"mount --bind {work}/resolv.conf /etc/resolv.conf",
        *script,
    )
    environment = {
        **os.environ,
        "PYTHONPATH": f"{TESTS.parent}:{TESTS}",
        "PYTHON": sys.executable,
        **variables,
    }
    return subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "sh", "-c", "\n".join(lines)],
        cwd=work, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip


def test_a_name_that_does_not_resolve_is_not_asked_about_and_loopback_is_all_it_takes(
    tmp_path: Path,
) -> None:
    """torch would look the host's name up, and wait for the name server a minute in all."""
    ended = inside(
        tmp_path, LO, VPN, SENT, f'"$PYTHON" -m dpexp {DDP2}', SENT,
        http_proxy="http://10.99.0.9:3128", https_proxy="http://10.99.0.9:3128",
        MASTER_ADDR="10.99.0.7", MASTER_PORT="29500",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    sent = [line for line in ended.stdout.splitlines() if line.startswith("datagrams")]
    assert sent == ["datagrams 0", "datagrams 0"]
    assert "torchrun: MASTER_ADDR, MASTER_PORT" in ended.stderr


@pytest.mark.parametrize(
    ("network", "hosts"),
    [(f"{LO}\n{VPN}", "10.99.0.2 work.vpn"), (LO, "fd99::2 work.vpn")],
    ids=["the name is a VPN's", "no network, and the name has an IPv6 address that is not there"],
)
def test_where_the_host_name_leads_does_not_matter(
    tmp_path: Path, network: str, hosts: str
) -> None:
    look = (
        f'"$PYTHON" -c "from test_open_ports import *; '
        f"print(all_addresses(look_at(Path(), '-m', 'dpexp', *'{DDP2}'.split())))\""
    )
    ended = inside(tmp_path, network, look, name="work.vpn", hosts=hosts)
    assert (ended.returncode, ended.stdout) == (0, "{'127.0.0.1'}\n"), ended.stderr


def test_loopback_that_is_down_is_told_in_one_line(tmp_path: Path) -> None:
    ended = inside(tmp_path, f'"$PYTHON" -m dpexp {DDP2}')
    assert (ended.returncode, ended.stdout) == (1, "")
    (line,) = ended.stderr.splitlines()
    assert "loopback is down" in line and "ip link set lo up" in line


def test_under_torchrun_the_ranks_bind_the_interface_that_they_are_told(tmp_path: Path) -> None:
    look = (
        '"$PYTHON" -c "from test_open_ports import *; '
        "seen = look_at(Path(), '-m', 'torch.distributed.run', '--nproc-per-node=2', "
        "'--master-addr=10.99.0.2', '-m', 'dpexp', 'parallel=ddp', 'parallel.interface=vpn0', "
        "'epochs=null', 'steps=300'); print(seen.listening['below'])\""
    )
    ended = inside(tmp_path, LO, VPN, look, name="work.vpn", hosts="10.99.0.2 work.vpn")
    assert (ended.returncode, ended.stdout) == (0, "{'10.99.0.2'}\n"), ended.stderr
