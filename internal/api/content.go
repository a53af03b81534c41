package api

import (
	"errors"
	"mime"
	"net/http"
	"strings"
)

// What can be wrong with how a body is labelled. Both are 415; they are two because each has its own header in the answer.
var (
	// errMediaTypeUnsupported is answered with Accept: application/json.
	errMediaTypeUnsupported = errors.New("media type is not application/json in UTF-8")
	// errContentCodingUnsupported is answered with Accept-Encoding: identity.
	errContentCodingUnsupported = errors.New("content coding is not identity")
)

// checkMediaType says whether a body is labelled as what the strict reader reads: application/json, whose only parameter may be
// charset=utf-8, and no content coding. The type comes first where both are wrong.
//
// A body without a type is refused, not guessed at. Types such as application/merge-patch+json are JSON with another meaning. A
// request that has no body needs no type either: where a route allows that, do not ask.
func checkMediaType(h http.Header) error {
	lines := h.Values("Content-Type")
	if len(lines) != 1 {
		return errMediaTypeUnsupported
	}
	mediaType, params, err := mime.ParseMediaType(lines[0])
	if err != nil || mediaType != "application/json" {
		return errMediaTypeUnsupported
	}
	for name, value := range params {
		// RFC 8259 gives application/json no parameters. Clients send this one all the same, and it is true.
		if name != "charset" || !strings.EqualFold(value, "utf-8") {
			return errMediaTypeUnsupported
		}
	}

	for _, line := range h.Values("Content-Encoding") {
		for coding := range strings.SplitSeq(line, ",") {
			coding = strings.Trim(coding, " \t")
			if coding != "" && !strings.EqualFold(coding, "identity") {
				return errContentCodingUnsupported
			}
		}
	}
	return nil
}
