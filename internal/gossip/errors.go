// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip

import "errors"

// ErrConfig is what every problem that [Config.Validate] finds is.
var ErrConfig = errors.New("gossip: config")
