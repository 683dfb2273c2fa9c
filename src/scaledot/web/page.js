/** Everything that the page can show; a report takes app.js alone where it holds no training run. */

import "./timeline.js";
import "./app.js";
