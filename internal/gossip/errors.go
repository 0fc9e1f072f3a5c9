// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip

import "errors"

// ErrConfig is the error, for errors.Is, of every fault that [Config.Validate] finds.
var ErrConfig = errors.New("gossip: config")
