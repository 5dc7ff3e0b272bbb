import json
import subprocess
import sys

import pytest

KEYS = {
    "schema_version",
    "key",
    "name",
    "names",
    "aliases",
    "peak_flops_per_s",
    "fp16_accumulate_flops_per_s",
    "num_sms",
    "memory_bytes",
    "driver_memory_bytes",
    "driver_source",
    "driver_read_on",
    "memory_bytes_per_s",
    "board_power_w",
    "link_bytes_per_s",
    "network_bytes_per_s",
    "devices_per_node",
    "link_source",
    "link_read_on",
    "assumed_links",
    "host_bytes_per_s",
    "source",
    "read_on",
    "disagreements",
    "from",
}


@pytest.fixture(autouse=True)
def own_configuration(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def test_all_devices_are_listed(headway):
    result = headway("devices")
    assert (result.code, result.err) == (0, "")
    lines = {line.split("  ")[0]: line.split() for line in result.out.splitlines()}
    # NVIDIA's datasheets: 989.4 bf16, 1,978.9 fp8, no fp4, 494.7 tf32, 66.9 fp32, 80 GB, 3,350 GB/s, 700 W
    assert " ".join(lines["NVIDIA H100 80GB HBM3"][4:]) == "989.4 1,978.9 - 494.7 66.9 1,978.9 80 3,350 700"
    assert lines["Tesla T4"][2:5] == ["65*", "-", "-"]  # fp16 alone
    assert "* fp16: no bf16" in result.out


def test_one_device_is_shown_with_its_source(headway):
    result = headway("devices", "rtx 3090")
    assert (result.code, result.err) == (0, "")
    assert "reported as      NVIDIA GeForce RTX 3090\n" in result.out
    assert "bf16             71 TFLOP/s, dense\n" in result.out
    assert "142 TFLOP/s in fp16 if accumulated in fp16" in result.out
    assert "read on          2026-" in result.out
    assert "elsewhere        bf16 35.6 TFLOP/s, the shaders' rate" in result.out
    assert max(map(len, result.out.splitlines())) <= 120


def test_one_device_as_json(headway):
    result = headway("devices", "MI250X", "--json")
    data = json.loads(result.out)
    assert set(data) == KEYS
    assert data["schema_version"] == 1
    assert data["names"] == ["AMD Instinct MI250X", "AMD Instinct MI250X / MI250"]
    assert data["peak_flops_per_s"]["bf16"] == 191.5e12  # of one of its two dies
    assert (data["memory_bytes"], data["memory_bytes_per_s"], data["board_power_w"]) == (64e9, 1.6e12, 250)
    assert data["read_on"].startswith("2026-")
    assert "383" in data["disagreements"][0]


def test_all_devices_as_json(headway):
    data = json.loads(headway("devices", "--json").out)
    assert data["schema_version"] == 1
    assert len({device["key"] for device in data["devices"]}) == len(data["devices"]) > 80
    assert {"schema_version", *data["devices"][0]} == KEYS


def test_a_shared_name_shows_every_card_that_has_it(headway):
    result = headway("devices", "NVIDIA GH200 480GB", "--json")
    assert result.code == 0
    assert "is the name of gh200-96gb (132 multiprocessors and 96 GB) and gh200-144gb" in result.err
    data = json.loads(result.out)
    assert data["key"] == "gh200-96gb"
    assert [device["memory_bytes"] for device in data["variants"]] == [96e9, 144e9]
    assert headway("devices", "3080").out.count("reported as") == 2


@pytest.mark.parametrize(("name", "offered"), [("NVIDIA L40s Plus", "NVIDIA L40S"), ("MI300Z", "MI300X")])
def test_an_unknown_name_exits_2_and_offers_close_ones(headway, name, offered):
    result = headway("devices", name)
    assert (result.code, result.out) == (2, "")
    assert repr(name) in result.err
    assert offered in result.err
    assert "HEADWAY_PEAK_FLOPS" in result.err


def test_a_users_device_is_shown_with_its_file(headway, tmp_path, monkeypatch):
    path = tmp_path / "lab.toml"
    path.write_text('[lab]\nnames = ["Lab 1"]\ntflops = { bf16 = 2 }\nsource = "the lab"\nread_on = 2026-11-21\n')
    monkeypatch.setenv("HEADWAY_PEAKS", str(path))
    assert f"from         {path}" in headway("devices", "lab").out
    assert json.loads(headway("devices", "LAB 1", "--json").out)["from"] == str(path)


def test_a_mistake_in_a_users_file_exits_2(headway, tmp_path, monkeypatch):
    path = tmp_path / "lab.toml"
    path.write_text("[lab]\n")
    monkeypatch.setenv("HEADWAY_PEAKS", str(path))
    result = headway("devices")
    assert result.code == 2
    assert "[lab]: tflops and source and read_on missing" in " ".join(result.err.split())


def test_no_torch_is_loaded():
    program = "import sys; sys.argv = ['headway', 'devices', 'H100']; from headway.cli.app import main\n"
    program += "try: main()\nexcept SystemExit: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n")
