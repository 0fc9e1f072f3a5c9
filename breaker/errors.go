// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package breaker

import "errors"

// ErrConfig means a configuration was refused. The text names every field
// that is wrong, its value and the allowed range.
var ErrConfig = errors.New("breaker: config")
