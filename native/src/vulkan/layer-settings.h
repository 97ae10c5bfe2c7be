#pragma once
// Names of VK_EXT_layer_settings for Vulkan headers older than 1.3.272 (Debian 12 has 1.3.239):
// upstream's Vulkan backend fills this structure in to switch a validation layer's setting, and is
// otherwise content with old headers. The layout is the specification's; drivers and loaders skip
// structures that they do not know.

#include <vulkan/vulkan_core.h>

#include <cstdint>
#include <vector>

#ifndef VK_EXT_layer_settings
namespace vk {

enum class LayerSettingTypeEXT : int32_t { eBool32 = 0 };

struct LayerSettingEXT {
    const char * pLayerName;
    const char * pSettingName;
    LayerSettingTypeEXT type;
    uint32_t valueCount;
    const void * pValues;
};

struct LayerSettingsCreateInfoEXT {
    int32_t sType = 1000496000; // VK_STRUCTURE_TYPE_LAYER_SETTINGS_CREATE_INFO_EXT
    const void * pNext = nullptr;
    uint32_t settingCount;
    const LayerSettingEXT * pSettings;

    explicit LayerSettingsCreateInfoEXT(const std::vector<LayerSettingEXT> & settings)
        : settingCount((uint32_t) settings.size()), pSettings(settings.data()) {}
};

} // namespace vk
#endif
