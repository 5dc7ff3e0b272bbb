import time

from headway.data.pack_times import charged_to, take_charges


def test_what_lies_within_is_charged_to_its_own_part():
    take_charges()
    begin = time.perf_counter()
    with charged_to("decode"):
        with charged_to("read"):
            time.sleep(0.02)
        with charged_to("read"):
            time.sleep(0.02)
    whole_s = time.perf_counter() - begin
    spent_s = take_charges()
    assert spent_s["read"] >= 0.04
    assert sum(spent_s.values()) <= whole_s
    assert take_charges() == {}


def test_an_error_ends_its_charge():
    take_charges()
    try:
        with charged_to("tokenise"):
            raise ValueError
    except ValueError:
        pass
    with charged_to("read"):
        pass
    assert take_charges().keys() == {"tokenise", "read"}
