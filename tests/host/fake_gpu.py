"""Tests: a GPU that isn't there. nvidia-smi and nvidia-ctk are stubs that answer as the real ones do, CDI is real."""

UUID = "GPU-fake-0000-1111"
DRIVER = "590.48.01"
FIELDS = {
    "uuid": UUID,
    "name": "Fake GPU",
    "driver_version": DRIVER,
    "compute_cap": "9.0",
    "pci.device_id": "0x233510DE",
    "pci.bus_id": "00000000:01:00.0",
    "mig.mode.current": "Disabled",
    "persistence_mode": "Enabled",
    "clocks_event_reasons.active": "0x0000000000000001",
    "memory.total": "81559",
    "memory.used": "4",
    "power.limit": "700.00",
    "power.default_limit": "700.00",
    "ecc.errors.uncorrected.volatile.total": "0",
}

CASES = "\n".join(f"    {name}) value='{value}' ;;" for name, value in FIELDS.items())
NVIDIA_SMI = f"""#!/bin/sh
case "$1" in
-L) echo 'GPU 0: Fake GPU (UUID: {UUID})'; exit 0 ;;
--query-gpu=*) fields=${{1#--query-gpu=}} ;;
*) exit 2 ;;
esac
line=
IFS=,
for field in $fields; do
    case "$field" in
{CASES}
    *) printf 'Field "%s" is not a valid field to query.\\n' "$field"; exit 2 ;;
    esac
    line="${{line:+$line, }}$value"
done
printf '%s\\n' "$line"
"""

SPEC = f"""cdiVersion: 0.5.0
containerEdits:
  mounts:
  - containerPath: /usr/bin/nvidia-smi
    hostPath: /usr/bin/nvidia-smi
    options: [ro, bind]
  - containerPath: /usr/lib/libnvidia-ml.so.{DRIVER}
    hostPath: /etc/hostname
    options: [ro, bind]
devices:
- containerEdits:
    env:
    - FAKE_GPU=1
  name: {UUID}
kind: nvidia.com/gpu
"""

REFRESH = "/etc/systemd/system/nvidia-cdi-refresh.service"
REFRESH_UNIT = """[Unit]
Description=Refresh the CDI spec

[Service]
Type=oneshot
ExecStart=/usr/bin/nvidia-ctk cdi generate --output=/var/run/cdi/nvidia.yaml

[Install]
WantedBy=multi-user.target
"""
POSTINST = "#!/bin/sh\nset -e\nsystemctl enable --now nvidia-cdi-refresh.service\n"


def nvidia_ctk(version: str) -> str:
    """A toolkit of that version, which writes CDI specs."""
    return f"""#!/bin/sh
case "$*" in
--version) echo 'NVIDIA Container Toolkit CLI version {version}' ;;
'cdi generate --output='*) file=${{3#--output=}}; mkdir -p "${{file%/*}}"; cat >"$file" <<'END'
{SPEC}END
    ;;
*) exit 2 ;;
esac
"""
