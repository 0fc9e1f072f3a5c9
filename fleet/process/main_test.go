// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package process

import (
	"os"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	if status, is := asProcess(); is {
		os.Exit(status)
	}
	goleak.VerifyTestMain(m)
}
