"""The table of forms in which models take images, sound or sources: a model takes the first that fits each argument."""

from headway.tracing.inputs import audio, grids, images, pages, patches, proteins, single_images, sources
from headway.tracing.inputs.form import InputForm

FORMS: tuple[type[InputForm], ...] = (
    sources.SourceIds,
    sources.SourceFeatures,
    sources.SourceWaves,
    grids.Grids,
    pages.PageFrames,
    pages.EncoderFrames,
    images.TiledFrames,
    images.CrossAttentionFrames,
    images.RobotFrames,
    single_images.SingleImages,
    patches.Patches,
    images.NestedFrames,
    images.Frames,
    images.VideoFrames,
    patches.FlattenedPatches,
    proteins.Proteins,
    audio.AddedAudio,
    audio.AudioFeatures,
    audio.AudioWaves,
)
