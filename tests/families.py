"""A small model of each timm family that has EWA forms."""

import timm

#: One architecture of each family, with arguments that make it as small as the family allows.
SMALL = {
    "beit_base_patch16_224": dict(img_size=32, embed_dim=32, depth=2, num_heads=2),
    "cait_xxs24_224": dict(img_size=32, embed_dim=32, depth=2, num_heads=2),
    "coat_tiny": dict(
        img_size=32,
        embed_dims=(32, 32, 32, 32),
        serial_depths=(1, 1, 1, 1),
        parallel_depth=1,
        num_heads=8,
    ),
    "convit_tiny": dict(img_size=32, embed_dim=32, depth=2, num_heads=2, local_up_to_layer=1),
    "test_convnext": dict(),
    "crossvit_9_240": dict(),
    "csatv2": dict(dims=(8, 16, 24, 32), depths=(1, 1, 3, 3)),
    "davit_tiny": dict(depths=(1, 1, 1, 1), embed_dims=(16, 16, 16, 32), num_heads=(2, 2, 2, 2)),
    "deepseek_vit_412m_enc": dict(img_size=84, embed_dim=32, depth=2, num_heads=2),
    "deit_tiny_patch16_224": dict(img_size=32, embed_dim=32, depth=2, num_heads=2),
    "edgenext_xx_small": dict(depths=(1, 1, 1, 2), dims=(16, 16, 16, 32)),
    "efficientformer_l3": dict(),
    "eva02_tiny_patch14_224": dict(img_size=28, embed_dim=32, depth=2, num_heads=2),
    "gcvit_xxtiny": dict(img_size=64),
    "gemma4_vit_570m_enc": dict(
        img_size=96,
        embed_dim=32,
        depth=2,
        num_heads=2,
        head_dim=16,
        intermediate_size=64,
        position_embedding_size=100,
    ),
    "hiera_tiny_224": dict(img_size=64, embed_dim=16, stages=(1, 1, 1, 1)),
    "sam2_hiera_tiny": dict(embed_dim=16, stages=(1, 2, 2, 1), global_att_blocks=(2,)),
    "maxvit_pico_rw_256": dict(img_size=64, depths=(1, 1, 1, 1), embed_dim=(32, 32, 32, 32)),
    "caformer_s18": dict(),
    "gmixer_12_224": dict(img_size=32),
    "mobilevit_xxs": dict(img_size=64),
    "mvitv2_tiny": dict(img_size=64),
    "naflexvit_base_patch16_gap": dict(embed_dim=32, depth=2, num_heads=2),
    "nest_tiny": dict(img_size=128),
    "pit_ti_224": dict(img_size=64),
    "qwen3_vit_88m": dict(img_size=64, embed_dim=32, depth=2, num_heads=2),
    "sequencer2d_s": dict(
        layers=(1, 1, 1, 1), embed_dims=(16, 16, 16, 16), hidden_sizes=(8, 8, 8, 8)
    ),
    "swin_tiny_patch4_window7_224": dict(
        img_size=64, embed_dim=16, depths=(1, 1, 1, 1), num_heads=(2, 2, 2, 2)
    ),
    "swinv2_tiny_window8_256": dict(
        img_size=64, embed_dim=16, depths=(1, 1, 1, 1), num_heads=(2, 2, 2, 2)
    ),
    "swinv2_cr_tiny_224": dict(
        img_size=64, embed_dim=16, depths=(1, 1, 1, 1), num_heads=(2, 2, 2, 2)
    ),
    "tiny_vit_5m_224": dict(
        embed_dims=(16, 16, 16, 32), depths=(1, 1, 1, 1), num_heads=(1, 1, 1, 2)
    ),
    "tnt_s_patch16_224": dict(
        img_size=32, embed_dim=32, depth=2, inner_dim=8, num_heads_inner=2, num_heads_outer=2
    ),
    "twins_svt_small": dict(
        img_size=64, embed_dims=(16, 16, 16, 16), num_heads=(2, 2, 2, 2), depths=(1, 1, 1, 1)
    ),
    "test_vit": dict(img_size=32),
    "vit_tiny_r_s16_p8_224": dict(img_size=32, embed_dim=32, depth=2, num_heads=2),
    "vit_relpos_small_patch16_224": dict(img_size=32, embed_dim=32, depth=2, num_heads=2),
    "samvit_base_patch16_224": dict(
        img_size=32, embed_dim=32, depth=2, num_heads=2, global_attn_indexes=(1,)
    ),
    "vitamin_small_224": dict(img_size=64, embed_dim=384, depth=2),
    "volo_d1_224": dict(img_size=64),
    "xcit_nano_12_p8_224": dict(img_size=32, embed_dim=32, depth=2, num_heads=2),
}
#: Older versions of timm have fewer families.
SMALL = {name: options for name, options in SMALL.items() if timm.is_model(name)}
