// A page opened from the disk may not read other pages: results are then listed without the lines around a hit.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
