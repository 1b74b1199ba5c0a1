"""The text and PNG curves show the recorded numbers."""

from wyfold.cli.train import curve

TRAINING = [(step, 8.0 if step < 50 else 2.0) for step in range(1, 101)]
VALIDATION = [(0, 8.0), (100, 2.0)]


def test_smoothing_starts_at_the_first_value():
    smoothed = curve.smooth(TRAINING)
    assert abs(smoothed[0][1] - 8.0) < 1e-12
    assert all(2.0 < value <= 8.0 + 1e-12 for _, value in smoothed)
    assert smoothed[-1][1] < 2.1


def test_the_sketch_falls_from_left_to_right():
    lines = curve.sketch(TRAINING, VALIDATION, width=40, height=6).splitlines()
    plot = [line[8:] for line in lines[1:7]]
    assert plot[0][0] == "o"
    assert plot[-1][39] == "o"
    assert lines[1].startswith("  8.00 |")
    assert lines[6].startswith("  2.00 |")
    assert lines[-1].endswith("step 100")


def test_sketches_of_zero_and_one_points():
    assert "no points" in curve.sketch([], [])
    assert curve.sketch([], [(0, 8.0)]).count("o") >= 1
    flat = curve.sketch([], [(0, 0.0), (9, 0.0)]).splitlines()
    assert flat[1].startswith("  0.50 |") and flat[12].startswith(" -0.50 |")
    assert "nan" not in curve.sketch([(1, float("nan"))], VALIDATION)


def test_the_picture_is_a_png(tmp_path):
    curve.draw(tmp_path / "curve.png", TRAINING, VALIDATION, "a run")
    content = (tmp_path / "curve.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) > 5000
    assert [path.name for path in tmp_path.iterdir()] == ["curve.png"]
